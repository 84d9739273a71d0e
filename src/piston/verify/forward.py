"""Layer 1: every intermediate of the forward pass and of sampling, against a bundle.

Each float32 set runs end to end and once more with the bundle's own time embedding (see `judge.py` for why).
"""

from collections.abc import Mapping

import numpy as np
import torch

from piston.model.pi0 import Pi0
from piston.verify import judge
from piston.verify.bundle import Arrays, Bundle, Dtype, ModelSet, under
from piston.verify.execute import Results, forward_and_gradient, load_model, same_shape, sampling
from piston.verify.preprocess import verify_preprocess
from piston.verify.report import Kind, Report, Row
from piston.verify.units import verify_units

# Data-flow order: what a tap depends on stands before it. A stem that ends in / or in "block" covers what it begins.
ORDER = (
    "siglip/stem",
    "siglip/with_posemb",
    "siglip/block",
    "siglip/encoded",
    "image_tokens/",
    "prefix_tokens",
    "prefix_mask",
    "prefix_ar_mask",
    "x_t",
    "u_t",
    "time_posemb",
    "adarms_cond",
    "suffix_tokens",
    "suffix_mask",
    "suffix_ar_mask",
    "attn_mask",
    "positions",
    "kv_k (prefix)",
    "kv_v (prefix)",
    "prefix_out",
    "kv_k (suffix)",
    "kv_v (suffix)",
    "suffix_out",
    "v_t",
    "loss_per_element",
    "loss_chunk",
    "loss",
    "sample/prefix_positions",
    "sample/prefix_k",
    "sample/prefix_v",
    "sample/suffix_positions",
    "sample/suffix_attn_mask",
    "sample/times",
    "sample/v_steps",
    "sample/x_steps",
    "sample/actions",
)
BEFORE_TIME = (*ORDER[: ORDER.index("time_posemb")], "kv_k (prefix)", "kv_v (prefix)", "prefix_out", "sample/prefix_")
OTHER_LAYERS = ("grads/", "grad_global_norm", "xla_default_jit/")  # xla_default_jit: the reference's own noise floor


def position(name: str) -> int:
    """Index of a tap in data-flow order; unknown names come last."""
    matches = [(len(stem), i) for i, stem in enumerate(ORDER) if name.startswith(stem)]
    return max(matches)[1] if matches else len(ORDER)


def valid_rows(arrays: Arrays, masks: Arrays) -> dict[str, np.ndarray]:
    """The arrays without the rows of masked tokens, whose values are arbitrary; keys and values split by expert."""
    prefix, suffix = masks["prefix_mask"], masks["suffix_mask"]
    width = prefix.shape[1]
    kept: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name in ("kv_k", "kv_v"):
            kept[f"{name} (prefix)"] = array[:, :, :width][:, prefix]
            kept[f"{name} (suffix)"] = array[:, :, width:][:, suffix]
        elif name in ("sample/prefix_k", "sample/prefix_v"):
            kept[name] = array[:, prefix]
        elif name == "prefix_out" or name.endswith("/prefix_out"):
            kept[name] = array[prefix]
        else:
            kept[name] = array
    return kept


def verify_forward(bundle: Bundle, device: str = "cpu") -> Report:
    """Compares every set of the bundle in every dtype it has."""
    report = Report("forward", str(bundle.root), [*verify_preprocess(bundle.root), *verify_units(bundle.root)])
    for model_set in bundle.models:
        for dtype in model_set.dtypes:
            reference = model_set.reference(dtype)
            masks = {k: reference[k] for k in ("prefix_mask", "suffix_mask")}
            model = load_model(model_set, dtype, device)
            ours = forward_and_gradient(model_set, model, device, gradient=False)
            ours |= sampling(model_set, model, device, reference)
            for name in ours.keys() & reference.keys():
                same_shape(name, ours[name], reference)
            kept, truth = valid_rows(ours, masks), valid_rows(reference, masks)
            names = sorted((n for n in truth if n in kept), key=lambda n: (position(n), n))
            if dtype == "float32":
                report.rows += _float32(model_set, model, device, kept, truth, names, masks)
            else:
                report.rows += _bfloat16(model_set, device, kept, truth, names, masks)
                report.rows += _bfloat16_parameters(model_set, device, reference, masks)
            skipped = [n for n in truth if n not in kept and not n.startswith((*OTHER_LAYERS, "bf16params/"))]
            report.not_compared += [f"{model_set.name}/{dtype}/{n}" for n in skipped]
    return report


def _kind(name: str) -> Kind:
    return "sampling" if name.startswith("sample/") else "tap"


def _exact_rows(model_set: ModelSet, dtype: Dtype, ours: Arrays, truth: Arrays, names: list[str]) -> dict[str, Row]:
    discrete = [n for n in names if truth[n].dtype.kind in "biu"]
    return {n: judge.exact(model_set.name, dtype, _kind(n), n, ours[n], truth[n]) for n in discrete}


def _float32(
    model_set: ModelSet, model: Pi0, device: str, ours: Arrays, truth: Arrays, names: list[str], masks: Arrays
) -> list[Row]:
    discrete = _exact_rows(model_set, "float32", ours, truth, names)
    posemb = truth.get("time_posemb")
    injected: Mapping[str, np.ndarray] = {}
    if posemb is not None:
        injected = valid_rows(forward_and_gradient(model_set, model, device, time_posemb=posemb, gradient=False), masks)
    rows, again, referee = [], [], None
    for name in names:
        if name in discrete:
            rows.append(discrete[name])
            continue
        before = name.startswith(BEFORE_TIME)
        tolerance = judge.BEFORE_TIME if before else judge.AFTER_TIME["end to end"]
        rows.append(judge.float32(model_set.name, _kind(name), name, ours[name], truth[name], tolerance))
        if before or name not in injected or name == "time_posemb":
            continue
        label, limit = f"{name} (injected time embedding)", judge.AFTER_TIME["injected"]
        row = judge.float32(model_set.name, "tap", name, injected[name], truth[name], limit, label=label)
        if not row.ok:
            referee = _referee(model_set, device, posemb, masks) if referee is None else referee
            row = judge.float32(
                model_set.name, "tap", name, injected[name], truth[name], limit, label=label, referee=referee[name]
            )
        again.append(row)
    return rows + again


def _referee(model_set: ModelSet, device: str, posemb: np.ndarray | None, masks: Arrays) -> Results:
    model = load_model(model_set, "float32", device, torch.float64)
    return valid_rows(forward_and_gradient(model_set, model, device, time_posemb=posemb, gradient=False), masks)


def float32_results(model_set: ModelSet, device: str) -> Results:
    """The set's float32 results: the reference's where the bundle has them, else our own float32 run."""
    if "float32" in model_set.dtypes:
        return model_set.reference("float32")
    model = load_model(model_set, "float32", device)
    return forward_and_gradient(model_set, model, device) | sampling(
        model_set, model, device, model_set.reference("bfloat16")
    )


def _bfloat16(
    model_set: ModelSet, device: str, ours: Arrays, truth: Arrays, names: list[str], masks: Arrays
) -> list[Row]:
    wide = valid_rows(float32_results(model_set, device), masks)
    discrete = _exact_rows(model_set, "bfloat16", ours, truth, names)
    rows = list(discrete.values())
    for kind in ("tap", "sampling"):
        chosen = [n for n in names if n not in discrete and _kind(n) == kind and n in wide]
        rows += judge.bfloat16(model_set.name, kind, ours, truth, wide, chosen)
    return rows


def _bfloat16_parameters(model_set: ModelSet, device: str, reference: Arrays, masks: Arrays) -> list[Row]:
    """`bf16params/*`: parameters rounded to bfloat16 as well, as openpi's policy loads them."""
    theirs = under(reference, "bf16params")
    if not theirs:
        return []
    model = load_model(model_set, "bfloat16", device, torch.bfloat16)
    ours = forward_and_gradient(model_set, model, device, gradient=False)
    if "sample_actions" in theirs:
        ours["sample_actions"] = sampling(model_set, model, device, ())["sample/actions"]
    wide = dict(float32_results(model_set, device))
    wide["sample_actions"] = wide.get("sample/actions", np.empty(0))
    names = sorted((n for n in theirs if n in ours and n in wide), key=lambda n: (position(n), n))
    rows = judge.bfloat16(model_set.name, "tap", ours, theirs, wide, names)
    return [type(row)(**{**vars(row), "name": f"{row.name} (bfloat16 parameters)"}) for row in rows]
