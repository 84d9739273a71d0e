"""Layer 2: the gradient of every parameter, against a bundle; the five furthest are named."""

import numpy as np
import torch

from piston.verify import judge
from piston.verify.bundle import Bundle, ModelSet, NamedArrays, under
from piston.verify.execute import Results, forward_and_gradient, load_model, same_shape
from piston.verify.forward import float32_results
from piston.verify.report import Report, Row


def verify_gradient(bundle: Bundle, device: str = "cpu") -> Report:
    """Compares the loss's gradient with respect to every parameter, in every dtype the bundle has."""
    report = Report("gradient", str(bundle.root))
    for model_set in bundle.models:
        for dtype in model_set.dtypes:
            recorded = model_set.reference(dtype)
            posemb = recorded.get("time_posemb")
            reference = NamedArrays(recorded.source, {k: v for k, v in recorded.items() if k.startswith("grad")})
            del recorded
            if not any(k.startswith("grads/") for k in reference):
                continue
            missing = sorted(f"grads/{k}" for k in model_set.params if f"grads/{k}" not in reference)
            report.not_compared += [f"{model_set.name}/{dtype}/{name}" for name in missing]
            for path in under(reference, "grads"):
                if path not in model_set.params:
                    raise ValueError(
                        f"bundle file {reference.source} has a gradient for {path!r}, which is no parameter of set "
                        f"{model_set.name}; expected the names of its _inputs.npz; record the bundle again"
                    )
                same_shape(f"grads/{path}", model_set.params[path], reference)
            if dtype == "float32":
                report.rows += _float32(model_set, device, reference, posemb)
            else:
                report.rows += _bfloat16(model_set, device, reference)
    return report


def _float32(model_set: ModelSet, device: str, reference: Results, posemb: np.ndarray | None) -> list[Row]:
    model = load_model(model_set, "float32", device)
    rows: list[Row] = []
    runs: dict[str, np.ndarray | None] = {"end to end": None}
    if posemb is not None:
        runs["injected"] = posemb
    for run, embedding in runs.items():
        ours = forward_and_gradient(model_set, model, device, time_posemb=embedding)
        tolerance = judge.GRADIENT[run]
        first = {n: _row(model_set, n, ours, reference, tolerance, run, None) for n in _ordered(reference)}
        if any(not row.ok for row in first.values()):
            double = load_model(model_set, "float32", device, torch.float64)
            referee = forward_and_gradient(model_set, double, device, time_posemb=embedding)
            first = {
                n: row if row.ok else _row(model_set, n, ours, reference, tolerance, run, referee)
                for n, row in first.items()
            }
        rows += first.values()
    return rows


def _row(
    model_set: ModelSet,
    name: str,
    ours: Results,
    reference: Results,
    tolerance: float,
    run: str,
    referee: Results | None,
) -> Row:
    label = name.removeprefix("grads/") + ("" if run == "end to end" else " (injected time embedding)")
    return judge.float32(
        model_set.name, "gradient", name, ours[name], reference[name], tolerance,
        label=label, referee=None if referee is None else referee[name],
    )  # fmt: skip


def _ordered(reference: Results) -> list[str]:
    """Backward order: what is nearest to the loss first, so that the first difference is the one to look at."""
    stages = (
        "action_out_proj",
        "final_norm",
        "llm/layers",
        "action",
        "time_mlp",
        "state_proj",
        "llm/embedder",
        "img/head",
    )

    def stage(name: str) -> int:
        return next((i for i, part in enumerate(stages) if part in name), len(stages))

    return sorted(reference, key=lambda n: (stage(n), n))


def _bfloat16(model_set: ModelSet, device: str, reference: Results) -> list[Row]:
    model = load_model(model_set, "bfloat16", device)
    ours = forward_and_gradient(model_set, model, device)
    wide = float32_results(model_set, device)
    return judge.bfloat16(model_set.name, "gradient", ours, reference, wide, _ordered(reference))
