"""Low-rank adapters with the reference's shapes: an A and B per head or gate, both trained, B not zero at first.

Source: openpi models/lora.py (Einsum, FeedForward)
"""

import functools

import torch
from torch import Tensor, nn

from piston.config.schema import LoraConfig
from piston.model.layers import rounded


class FanOut(nn.Module):
    """x → G outputs side by side, each with its own factors: query (G = heads), key/value (G = 2·K), gating (G = 2)."""

    def __init__(self, config: LoraConfig, groups: int, d_in: int, d_out: int, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.a = nn.Parameter(torch.empty(groups, d_in, config.rank))
        self.b = nn.Parameter(torch.empty(groups, config.rank, d_out))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("...i,gir->...gr", x, self.a.to(x.dtype))
        return torch.einsum("...gr,gro->...go", low, self.b.to(x.dtype)).flatten(-2) * rounded(self.scaling, x.dtype)


class FanIn(nn.Module):
    """G inputs side by side → one output: attention output (G = heads), FFN down projection (G = 1).

    A contracts over groups and width together; B is summed over groups, one after the other as the reference's einsum
    does, which in bfloat16 rounds each time.
    """

    def __init__(self, config: LoraConfig, groups: int, d_in: int, d_out: int, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.a = nn.Parameter(torch.empty(groups, d_in, config.rank))
        self.b = nn.Parameter(torch.empty(groups, config.rank, d_out))

    def forward(self, x: Tensor) -> Tensor:
        low = x @ self.a.to(x.dtype).flatten(0, 1)
        return low @ functools.reduce(torch.add, self.b.to(x.dtype).unbind(0)) * rounded(self.scaling, x.dtype)
