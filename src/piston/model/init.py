"""The reference's initialisers, by parameter name; each parameter is drawn from (seed, its own name).

So the value of a parameter depends neither on the order of construction nor on which other parameters exist.
Source: openpi models/*.py at commit 15a9616 (flax lecun_normal, xavier_uniform; big_vision SigLIP).
"""

import hashlib
import math
import re

import torch
from torch import Tensor, nn

TRUNCATED_STD = 0.87962566103423978  # std of a standard normal cut at ±2


def _lecun(p: Tensor, generator: torch.Generator) -> None:
    """Truncated normal with variance 1/fan_in; weights are stored [out, in]."""
    std = math.sqrt(1.0 / p.shape[1]) / TRUNCATED_STD
    nn.init.trunc_normal_(p, std=std, a=-2 * std, b=2 * std, generator=generator)


def _xavier_uniform(p: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(p, generator=generator)


def _normal(std: float):
    def draw(p: Tensor, generator: torch.Generator) -> None:
        p.normal_(0.0, std, generator=generator)

    return draw


def _position(p: Tensor, generator: torch.Generator) -> None:
    p.normal_(0.0, 1 / math.sqrt(p.shape[-1]), generator=generator)


def _zeros(p: Tensor, generator: torch.Generator) -> None:
    p.zero_()


def _ones(p: Tensor, generator: torch.Generator) -> None:
    p.fill_(1.0)


# First match wins.
RULES = (
    (r"\.lora\.[ab]$", _normal(0.01)),
    (r"^siglip\.pos_embedding$", _position),
    (r"^siglip\.patch_embed\.weight$", _lecun),
    (r"^siglip\.head\.", _zeros),
    (r"^siglip\..*\.(q|k|v|out|fc1|fc2)\.weight$", _xavier_uniform),
    (r"^siglip\..*\.fc[12]\.bias$", _normal(1e-6)),
    (r"^siglip\..*norm(_attn|_mlp)?\.weight$", _ones),
    (r"^gemma\.embedding$", _normal(0.01)),
    (r"\.modulation\.", _zeros),
    (r"\.scale$", _zeros),
    (r"\.bias$", _zeros),
    (r"\.weight$", _lecun),
)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draws every parameter in place, on the CPU so that every device starts from the same numbers."""
    for name, parameter in model.named_parameters():
        rule = next(rule for pattern, rule in RULES if re.search(pattern, name))
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # A frozen bfloat16 parameter is drawn in float32 and rounded, as openpi does.
        drawn = torch.empty(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32))
        rule(drawn, generator)
        parameter.copy_(drawn)
