"""The primitives of every transformer layer here, rounded where the reference rounds.

In float32 they are torch's fused kernels. In bfloat16 each is spelled out operation by operation, since the reference
rounds after every operation and a kernel that keeps float32 inside gives other bits. Under
torch.compile the compiler may fuse them again, as XLA does.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """x in float32, where the reference leaves the compute dtype; float64 stays (the verifier's referee)."""
    return x if x.dtype == torch.float64 else x.float()


class Projection(nn.Module):
    """y = x·Wᵀ (+ b) (+ adapter(x)), W float32 [out, in], cast to x's dtype right before the product."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, adapter: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.lora = adapter

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            y = F.linear(x, self.weight.to(x.dtype), bias)
        else:
            y = F.linear(x, self.weight.to(x.dtype))
            y = y if self.bias is None else y + self.bias.to(x.dtype)
        return y if self.lora is None else y + self.lora(x)


def rounded(value: float, dtype: torch.dtype) -> float:
    """A constant as the reference holds it: rounded to the compute dtype first (√72 is 8.5 in bfloat16)."""
    return torch.tensor(value, dtype=dtype).item()


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as flax and Gemma use it."""
    if x.dtype != torch.bfloat16:
        return F.gelu(x, approximate="tanh")
    inner = rounded(math.sqrt(2 / math.pi), x.dtype) * (x + rounded(0.044715, x.dtype) * (x * (x * x)))
    return x * (0.5 * (1.0 + torch.tanh(inner)))


def unmasked_attention(q_BNQE: Tensor, k_BNQE: Tensor, v_BNQE: Tensor) -> Tensor:
    """softmax(q·kᵀ)·v with logits and softmax in the compute dtype (flax's default; only the vision tower uses it)."""
    q, k, v = (t.transpose(1, 2) for t in (q_BNQE, k_BNQE, v_BNQE))
    if q.dtype != torch.bfloat16:
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    else:
        logits = q @ k.transpose(-1, -2)
        shifted = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
        out = (shifted / shifted.float().sum(-1, keepdim=True).to(q.dtype)) @ v
    return out.transpose(1, 2)
