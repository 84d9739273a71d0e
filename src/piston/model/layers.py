"""The primitives of every transformer layer here, rounded where the reference rounds.

In float32 they are torch's fused kernels. In bfloat16 each is spelled out operation by operation, since the reference
rounds after every operation and a kernel that keeps float32 inside gives other bits. Under
torch.compile the compiler may fuse them again, as XLA does.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

XLA_RUN = 32


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

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two halves of y, where the reference makes two products and so rounds x's gradient twice. No bias."""
        if x.dtype != torch.bfloat16:
            first, second = self(x).chunk(2, dim=-1)
            return first, second
        y = torch.cat([F.linear(x, w) for w in self.weight.to(x.dtype).chunk(2)], dim=-1)
        first, second = (y if self.lora is None else y + self.lora(x)).chunk(2, dim=-1)
        return first, second


def rounded(value: float, dtype: torch.dtype) -> float:
    """A constant as the reference holds it: rounded to the compute dtype first (√72 is 8.5 in bfloat16)."""
    return torch.tensor(value, dtype=dtype).item()


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as flax and Gemma use it."""
    return F.gelu(x, approximate="tanh") if x.dtype != torch.bfloat16 else _RoundedGelu.apply(x)


class _RoundedGelu(torch.autograd.Function):
    """GELU and its derivative, each operation rounded to x's dtype in the order of jax.nn.gelu and jax.grad."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * _gelu_parts(x)[1]

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        tanh, cdf = _gelu_parts(x)
        through_cdf = (0.5 * (grad * x)) * (1.0 - tanh)
        inner = rounded(math.sqrt(2 / math.pi), x.dtype) * (through_cdf + through_cdf * tanh)
        cube = (rounded(0.044715, x.dtype) * inner) * (3.0 * (x * x))
        return (cube + inner) + grad * cdf  # in this order under openpi's rematerialised layers


def _gelu_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tanh of the tanh form, and the approximated normal distribution function."""
    inner = rounded(math.sqrt(2 / math.pi), x.dtype) * (x + rounded(0.044715, x.dtype) * (x * (x * x)))
    tanh = torch.tanh(inner)
    return tanh, 0.5 * (1.0 + tanh)


def unmasked_attention(q_BNQE: Tensor, k_BNQE: Tensor, v_BNQE: Tensor) -> Tensor:
    """softmax(q·kᵀ)·v with logits and softmax in the compute dtype (flax's default; only the vision tower uses it)."""
    q, k, v = (t.transpose(1, 2) for t in (q_BNQE, k_BNQE, v_BNQE))
    if q.dtype != torch.bfloat16:
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    else:
        out = _RoundedSoftmax.apply(q @ k.transpose(-1, -2))[0] @ v
    return out.transpose(1, 2)


class _RoundedSoftmax(torch.autograd.Function):
    """Softmax over the last axis and its derivative, each operation rounded to x's dtype as in jax.nn.softmax."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = torch.exp(x - x.amax(-1, keepdim=True))
        total = shifted.sum(-1, keepdim=True)
        return shifted / total, shifted, total

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        grad, (shifted, total) = grad_outputs[0], ctx.saved_tensors
        through_total = rounded_sum((grad * (1.0 / (total * total))) * shifted)
        return (grad / total - through_total) * shifted


def spread(x_B1Y: Tensor, tokens: int) -> Tensor:
    """One row for every token; in bfloat16 the gradient is summed as `rounded_sum` does."""
    if x_B1Y.dtype != torch.bfloat16:
        return x_B1Y.expand(-1, tokens, -1)
    return _RoundedSpread.apply(x_B1Y, tokens)


class _RoundedSpread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, tokens: int) -> Tensor:
        return x.expand(-1, tokens, -1)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        return rounded_sum(grad.transpose(1, 2)).transpose(1, 2), None


def rounded_sum(x: Tensor) -> Tensor:
    """Sum over the last axis, kept. On a CPU rounded after every addition, as XLA's CPU backend adds bfloat16.

    It adds runs of 32 first, with zeros at both ends to make them whole, then the sums of the runs. Only gradients are
    summed like this; in the forward pass the reference sums in float32.
    """
    if x.is_cuda:
        return x.sum(-1, keepdim=True)
    if x.shape[-1] > XLA_RUN:
        missing = -x.shape[-1] % XLA_RUN
        runs = F.pad(x, (missing // 2, missing - missing // 2)).unflatten(-1, (-1, XLA_RUN))
        x = functools.reduce(torch.add, runs.unbind(-1))
    return functools.reduce(torch.add, x.unbind(-1))[..., None]
