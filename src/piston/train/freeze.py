"""Which parameters are trained: all, but for groups frozen by name, or with LoRA by openpi's rule. Frozen: bfloat16.

Source: openpi models/pi0_config.py (get_freeze_filter), scripts/train.py.
"""

from collections.abc import Iterable

import torch
from rich.table import Table
from torch import nn

from piston.config.schema import ModelConfig
from piston.model.pi0 import Pi0

GROUPS = ("vision", "vlm", "expert", "heads")


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: one of GROUPS."""
    if name.startswith("siglip."):
        return "vision"
    if not name.startswith("gemma."):
        return "heads"
    return "expert" if name.startswith("gemma.suffix_norm") or ".suffix." in name else "vlm"


def trainable(model: ModelConfig, name: str) -> bool:
    """openpi's rule. LoRA on an expert freezes that expert, and LoRA on the VLM the VLM, all but the adapters.

    The embedding belongs to the VLM. Besides, `model.freeze` freezes groups by name, all but their adapters.
    """
    if group_of(name) in model.freeze:
        return ".lora." in name
    adapted = {"vlm": model.paligemma, "expert": model.action_expert}.get(group_of(name))
    if adapted is None or ".lora." in name:
        return True
    return adapted.lora_attn is None and adapted.lora_ffn is None


def freeze(model: Pi0) -> None:
    """Makes frozen parameters bfloat16 and switches their gradients off. The values are rounded; nothing else moves."""
    for module_name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{leaf}" if module_name else leaf
            if not trainable(model.config, name):
                setattr(module, leaf, nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False))


def counts(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, tuple[int, int]]:
    """Trained and all parameters of each group that has any, and of the adapters ("LoRA")."""
    totals: dict[str, tuple[int, int]] = {}
    for name, parameter in parameters:
        group = "LoRA" if ".lora." in name else group_of(name)
        trained, total = totals.get(group, (0, 0))
        totals[group] = (trained + parameter.numel() * parameter.requires_grad, total + parameter.numel())
    return totals


def trainable_table(model: Pi0) -> Table:
    """Trained and all parameters by group."""
    table = Table("group", "trained", "parameters", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = counts(model.named_parameters())
    trained, total = (sum(row[i] for row in rows.values()) for i in range(2))
    for group, (part, whole) in {**rows, "all": (trained, total)}.items():
        table.add_row(group, f"{part:,}", f"{whole:,}", f"{part / whole:.1%}")
    return table
