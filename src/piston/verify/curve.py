"""A recorded training run replayed with the real optimizer: every step's loss, gradient norm and rate, parameters, EMA.

Replays each variant the bundle holds: `curve`, and any `curve_<name>` with its own dtype or clip.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piston.batch import Observation
from piston.config.schema import OptimConfig
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0
from piston.model.weights import to_openpi_jax
from piston.train.optim import Optimizer, learning_rate, parameter_norm
from piston.verify import judge
from piston.verify.bundle import Arrays, Bundle, CurveSet, Dtype, stacked_observation, under
from piston.verify.execute import Results, load_model, numpy, time_posemb_of_one
from piston.verify.report import Report, Row

STEP_TOLERANCE = 2e-4  # relative, loss and gradient norm of every step
RATE_TOLERANCE = 1e-6  # relative
PARAMETER_TOLERANCE = 5e-5  # absolute, parameters and EMA after the run
WAY_TOLERANCE = 1e-3  # relative L2
SCALARS = ("loss", "grad_norm", "param_norm", "lr")


def optim_config(settings: dict[str, Any], clip: float | None) -> OptimConfig:
    """The recorded optimizer settings; `clip` overrides the gradient clip (a variant's own)."""
    values = {**settings["optimizer_defaults"], **settings["opt"]}
    if clip is not None:
        values["clip_gradient_norm"] = clip
    schedule = settings["sched"]
    config = OptimConfig(
        schedule="rsqrt" if "timescale" in schedule else "cosine",
        warmup_steps=int(schedule["warmup_steps"]),
        peak_lr=float(schedule["peak_lr"]),
        ema_decay=None if settings["ema"] is None else float(settings["ema"]),
        b1=float(values["b1"]),
        b2=float(values["b2"]),
        eps=float(values["eps"]),
        weight_decay=float(values["weight_decay"]),
        clip_gradient_norm=float(values["clip_gradient_norm"]),
    )
    if config.schedule == "rsqrt":
        return dataclasses.replace(config, timescale=float(schedule["timescale"]))
    return dataclasses.replace(config, decay_steps=int(schedule["decay_steps"]), decay_lr=float(schedule["decay_lr"]))


def _batches(curve: CurveSet, cameras: tuple[str, ...], device: str) -> list[tuple[Observation, Tensor]]:
    """The recorded batches on the device: observation with images in [-1, 1], and actions."""
    arrays = under(curve.arrays, "batches")
    size = arrays["actions"].shape[0]
    batches = []
    for i in range(size):
        one = {name: array[i] for name, array in arrays.items()}
        images = under(one, "images") or {
            c: (one[f"images_u8/{c}"].astype(np.float32) / np.float32(255.0) * 2 - 1).astype(np.float32)
            for c in cameras
        }
        observation = stacked_observation(one, cameras, images)
        placed = Observation(**{k: v.to(device) for k, v in vars(observation).items()})
        batches.append((placed, torch.from_numpy(one["actions"]).to(device)))
    return batches


def variants(arrays: Arrays) -> list[str]:
    """The recorded runs: every prefix that has a loss."""
    return sorted(name.removesuffix("/loss") for name in arrays if name.endswith("/loss"))


def replay(curve: CurveSet, variant: str, dtype: Dtype, device: str) -> tuple[Results, dict[str, Results]]:
    """Scalars of every step, and parameters by checkpoint name (`params_after_<k>`, `final_params`, `final_ema`)."""
    arrays = curve.arrays
    clip = arrays.get(f"{variant}/clip_gradient_norm")
    model = load_model(curve.base, dtype, device)
    named = dict(model.named_parameters())
    optimizer = Optimizer(named, optim_config(curve.settings, None if clip is None else float(clip)))
    batches = _batches(curve, model.config.cameras, device)
    wanted = {int(m.group(1)) for k in arrays if (m := re.match(r"params_after_(\d+)/", k))}
    saved: dict[str, Results] = {}
    scalars: dict[str, list[Tensor]] = {name: [] for name in SCALARS if name != "lr"}
    for step in range(arrays["noise"].shape[0]):
        observation, actions = batches[step % len(batches)]
        noise, time = (torch.from_numpy(arrays[k][step]).to(device) for k in ("noise", "time"))
        loss = flow_loss(model, observation, actions, noise, time, time_posemb=time_posemb_of_one(model, time)).mean()
        loss.backward()
        scalars["grad_norm"].append(optimizer.update())
        scalars["loss"].append(loss.detach())
        scalars["param_norm"].append(parameter_norm(named))
        if step + 1 in wanted:
            saved[f"params_after_{step + 1}"] = _jax(model, named)
    saved["final_params"] = _jax(model, named)
    if optimizer.ema is not None:
        saved["final_ema"] = _jax(model, {**named, **optimizer.ema})
    return {k: np.array([float(v) for v in values]) for k, values in scalars.items()}, saved


def _jax(model: Pi0, state: Mapping[str, Tensor]) -> Results:
    return {
        k: numpy(v).copy() for k, v in to_openpi_jax(model.config, {k: v.detach() for k, v in state.items()}).items()
    }


def verify_curve(bundle: Bundle, device: str = "cpu") -> Report:
    """Replays every recorded run of the bundle."""
    report = Report("curve", str(bundle.root))
    for curve in bundle.curves:
        _check_settings(curve)
        for variant in variants(curve.arrays):
            report.rows += list(_compare(curve, variant, device))
    return report


def _check_settings(curve: CurveSet) -> None:
    """Raises ValueError, naming the set, for settings that are missing or make no optimizer."""
    where = f"curve set {curve.name} of {curve.root / 'MANIFEST.json'}"
    try:
        optim_config(curve.settings, None)
    except KeyError as error:
        raise ValueError(
            f"{where} has no field {error}; expected sched, opt, ema and optimizer_defaults as in the golden format; "
            "record the bundle again"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the settings of {where} make no optimizer: {error}; expected those of the golden format; correct them or "
            "record the bundle again"
        ) from error


def _compare(curve: CurveSet, variant: str, device: str) -> Iterator[Row]:
    dtype: Dtype = "bfloat16" if "bfloat16" in variant else "float32"
    scalars, saved = replay(curve, variant, dtype, device)
    reference = under(curve.arrays, variant)
    scalars["lr"] = _rates(curve, len(reference["loss"]))
    label = f"{curve.name}/{variant}"
    if dtype == "bfloat16":
        yield from _bfloat16(label, scalars, reference, under(curve.arrays, "curve"))
        return
    for step in range(len(reference["loss"])):
        for name in ("lr", "loss", "grad_norm", "param_norm"):
            if name in reference:
                ours, theirs = float(scalars[name][step]), float(reference[name][step])
                limit = RATE_TOLERANCE if name == "lr" else STEP_TOLERANCE
                error = abs(ours - theirs) / abs(theirs) if theirs else abs(ours)
                yield Row(label, dtype, "curve", f"{name} at step {step}", error, limit, "relative")
    if variant == "curve":
        for checkpoint, parameters in saved.items():
            recorded = under(curve.arrays, checkpoint)
            if recorded:
                yield _way(label, checkpoint, parameters, recorded, curve.base.params)
            for path, theirs in recorded.items():
                if judge.exactly_zero_gradient(path):  # Adam divides rounding noise by itself
                    continue
                error = float(np.abs(parameters[path].astype(np.float64) - theirs).max())
                yield Row(label, dtype, "curve", f"{checkpoint}/{path}", error, PARAMETER_TOLERANCE, "max abs")


def _way(label: str, checkpoint: str, ours: Arrays, theirs: Arrays, start: Arrays) -> Row:
    """The way that all parameters together have gone since the start: a short run moves them by less than a tolerance
    on their values would notice."""
    names = [name for name in theirs if not judge.exactly_zero_gradient(name)]
    apart, way = (
        sum(float(np.square(a[n].astype(np.float64) - b[n]).sum()) for n in names)
        for a, b in ((ours, theirs), (theirs, start))
    )
    error = math.sqrt(apart / way) if way else float("inf")
    return Row(label, "float32", "curve", f"{checkpoint}: way from the start", error, WAY_TOLERANCE, "relative L2")


def _rates(curve: CurveSet, steps: int) -> np.ndarray:
    config = optim_config(curve.settings, None)
    return np.array([learning_rate(config, step) for step in range(steps)])


def _bfloat16(label: str, ours: Results, reference: Results, wide: Results) -> Iterator[Row]:
    """Whole curves: RMS relative distance to the float32 run, ours over the reference's."""
    for name in ("loss", "grad_norm", "param_norm"):
        if name in reference and name in wide:
            own, theirs = (
                float(np.sqrt(np.mean(((run[name].astype(np.float64) - wide[name]) / wide[name]) ** 2)))
                for run in (ours, reference)
            )
            if theirs < judge.BEFORE_TIME:  # bfloat16 compute does not reach this one: it must agree as in float32
                yield Row(label, "bfloat16", "curve", name, own, judge.BEFORE_TIME, "RMS relative distance to float32")
                continue
            note = f"ours {own:.1e}, reference's {theirs:.1e}"
            measure = "RMS distance to float32, ours / reference's"
            yield Row(label, "bfloat16", "curve", name, own / theirs, judge.BFLOAT16_RATIO, measure, note)
