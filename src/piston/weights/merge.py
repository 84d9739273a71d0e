"""LoRA folded into the weights it stands beside: W + s·(A·B)ᵀ, for layouts that have no place for adapters."""

import dataclasses
import re
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from piston.config.schema import GemmaConfig, ModelConfig

ADAPTED = re.compile(r"gemma\.blocks\.\d+\.(prefix|suffix)\.(q|kv|o|gate_up|down)\.weight$")
FAN_IN = ("o", "down")


def without_lora(model: ModelConfig) -> ModelConfig:
    """The model after merging."""

    def plain(gemma: GemmaConfig) -> GemmaConfig:
        return dataclasses.replace(gemma, lora_attn=None, lora_ffn=None)

    return dataclasses.replace(model, paligemma=plain(model.paligemma), action_expert=plain(model.action_expert))


def has_lora(model: ModelConfig) -> bool:
    return without_lora(model) != model


def merged(model: ModelConfig, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """A parameter of the merged model; `read` gives those of the model with adapters.

    Computed in float32 at least and rounded once to the weight's dtype. Formulas as in model/lora.py.
    """
    weight, match = read(name), ADAPTED.match(name)
    if match is None:
        return weight
    gemma = model.paligemma if match[1] == "prefix" else model.action_expert
    attention = match[2] in ("q", "kv", "o")
    lora = gemma.lora_attn if attention else gemma.lora_ffn
    if lora is None:
        return weight
    stem = name.removesuffix("weight")
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (read(f"{stem}lora.{factor}").to(wide) for factor in "ab")
    if match[2] in FAN_IN:
        change = (a.flatten(0, 1) @ b.sum(dim=0)).T
    else:
        change = rearrange(torch.bmm(a, b), "g i o -> (g o) i")
    return (weight.to(wide) + change * (lora.scaling if attention else 1.0)).to(weight.dtype)
