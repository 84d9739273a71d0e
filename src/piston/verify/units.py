"""Single building blocks against a bundle's `units.npz` and `schedule.npz`: small enough to catch an epsilon.

A wrong epsilon moves a whole model by less than rounding does; it shows on a norm of tiny inputs.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piston.config.schema import OptimConfig
from piston.model.attention import attention_mask, rope_angles, rotate
from piston.model.gemma import AdaRMSNorm, RMSNorm, gated_residual
from piston.model.layers import gelu
from piston.model.pi0 import time_embedding
from piston.model.siglip import LayerNorm
from piston.train.optim import learning_rate
from piston.verify.bundle import Dtype, NamedArrays, read_npz, under
from piston.verify.report import Row, relative_max

# float32: a few roundings. bfloat16: one rounding step of an array's largest entry (2^-8), doubled.
TOLERANCE: dict[str, float] = {"float32": 2e-6, "bfloat16": 8e-3}
NORM_TOLERANCE: dict[str, float] = {**TOLERANCE, "float32": 1e-6}  # a variance in two passes is 1.9e-6 off
RATE_TOLERANCE = 1e-6
TINY_SCHEDULE = OptimConfig(warmup_steps=10, peak_lr=1e-3, decay_steps=60, decay_lr=1e-4)  # of the golden format
RSQRT_SCHEDULE = OptimConfig(schedule="rsqrt", peak_lr=5e-5)  # openpi's defaults


def verify_units(root: Path) -> list[Row]:
    """Rows for every unit the directory has; none where it has no such files."""
    rows: list[Row] = []
    if (root / "units.npz").exists():
        arrays = read_npz(root / "units.npz")
        for dtype in ("float32", "bfloat16"):
            rows += [*_norms(arrays, dtype), *_rope(arrays, dtype), *_activations(arrays, dtype)]
        rows += [*_time_embedding(arrays), *_masks(arrays)]
    if (root / "schedule.npz").exists():
        rows += _schedule(read_npz(root / "schedule.npz"))
    return rows


def _row(name: str, dtype: Dtype, ours: Tensor, reference: np.ndarray, tolerance: float | None = None) -> Row:
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    return Row("units", dtype, "unit", name, relative_max(ours.detach().float().numpy(), reference), limit)


def _norms(arrays: NamedArrays, dtype: Dtype) -> Iterator[Row]:
    parameters = {k: torch.from_numpy(arrays[f"norm/{k}"]) for k in ("rms_scale", "ln_scale", "ln_bias", "cond")}
    width = parameters["rms_scale"].shape[0]
    rms, ada, layer = RMSNorm(width), AdaRMSNorm(width), LayerNorm(width)
    rms.scale = torch.nn.Parameter(parameters["rms_scale"])
    ada.modulation.weight = torch.nn.Parameter(torch.from_numpy(arrays["norm/ada_kernel"]).T.contiguous())
    ada.modulation.bias = torch.nn.Parameter(torch.from_numpy(arrays["norm/ada_bias"]))
    layer.weight, layer.bias = torch.nn.Parameter(parameters["ln_scale"]), torch.nn.Parameter(parameters["ln_bias"])
    for case in sorted({name.split("/")[1] for name in arrays if name.startswith("norm/") and name.endswith("/x")}):
        x = torch.from_numpy(arrays[f"norm/{case}/x"]).to(getattr(torch, dtype))
        modulated, gate = ada(x, parameters["cond"])
        results = {"rms": rms(x)[0], "ada": modulated, "ada_gate": gate, "ln": layer(x)}
        for name, ours in results.items():
            yield _row(f"norm/{case}/{name}", dtype, ours, arrays[f"norm/{case}/{name}_{dtype}"], NORM_TOLERANCE[dtype])


def _rope(arrays: NamedArrays, dtype: Dtype) -> Iterator[Row]:
    for head in sorted({name.split("/")[1] for name in arrays if name.startswith("rope/")}):
        x = torch.from_numpy(arrays[f"rope/{head}/x"]).to(getattr(torch, dtype))
        angles = rope_angles(torch.from_numpy(arrays[f"rope/{head}/positions"]), x.shape[-1])
        yield _row(f"rope/{head}", dtype, rotate(x, *angles), arrays[f"rope/{head}/y_{dtype}"])


def _activations(arrays: NamedArrays, dtype: Dtype) -> Iterator[Row]:
    x = torch.from_numpy(arrays["act/x"]).to(getattr(torch, dtype))
    yield _row("act/gelu", dtype, gelu(x), arrays["act/gelu" if dtype == "float32" else "act/gelu_bfloat16"])
    if dtype == "float32":
        yield _row("act/swish", dtype, torch.nn.functional.silu(x), arrays["act/swish"])
    parts = [torch.from_numpy(arrays[f"gated/{k}"]).to(x.dtype) for k in ("x", "y", "gate")]
    yield _row("gated", dtype, gated_residual(*parts), arrays[f"gated/out_{dtype}"])


def _time_embedding(arrays: NamedArrays) -> Iterator[Row]:
    time = torch.from_numpy(arrays["posemb/time"])
    for name, reference in under(arrays, "posemb").items():
        if name.startswith("dim"):
            yield _row(f"posemb/{name}", "float32", time_embedding(time, reference.shape[1]), reference, 1e-6)


def _masks(arrays: NamedArrays) -> Iterator[Row]:
    for case in sorted({name.split("/")[1] for name in arrays if name.startswith("mask/")}):
        valid, starts = (torch.from_numpy(arrays[f"mask/{case}/{k}"]) for k in ("input_mask", "mask_ar"))
        differing = float((attention_mask(valid, starts).numpy() != arrays[f"mask/{case}/attn_mask"]).sum())
        yield Row("units", "float32", "unit", f"mask/{case}", differing, 0.0, "differing entries")


def _schedule(arrays: NamedArrays) -> list[Row]:
    curves = {
        "lr": (OptimConfig(), "steps"),
        "tiny_lr": (TINY_SCHEDULE, "tiny_steps"),
        "rsqrt_lr": (RSQRT_SCHEDULE, "steps"),
    }
    rows = []
    for name, (config, steps) in curves.items():
        ours = np.array([learning_rate(config, int(step)) for step in arrays[steps]])
        error = float(np.max(np.abs(ours - arrays[name]) / arrays[name]))
        rows.append(Row("schedule", "float32", "unit", name, error, RATE_TOLERANCE, "relative, worst step"))
    return rows
