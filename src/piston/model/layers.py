"""The two primitives every transformer layer here is made of: a float32 weight used in the activations' dtype, GELU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """y = x·Wᵀ (+ b) (+ adapter(x)), W float32 [out, in], cast to x's dtype right before the product."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, adapter: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.lora = adapter

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        return y if self.lora is None else y + self.lora(x)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as flax and Gemma use it."""
    return F.gelu(x, approximate="tanh")
