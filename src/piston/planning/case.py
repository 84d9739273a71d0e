"""A request with every blank filled in: recipe, catalogue, anchors and efficiency as one set of numbers."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from piston.config.recipes import recipe
from piston.config.schema import ModelConfig, require
from piston.model.cost import Dead, dead_parameters, flops, total_parameters, trained_parameters
from piston.planning.coefficients import flop_quadratics, reshaped, unit_quadratics
from piston.planning.figure import Figure, derived, given, measured, quoted
from piston.planning.formulas import configure, executed_flops
from piston.planning.gpus import Gpu, find_gpu
from piston.planning.request import Kernels, Request, check_batch
from piston.planning.throughput import Anchors, Efficiency, Fit, fit, published_efficiency, read_anchors

OVERLAP = quoted(0.829, "", "per-block FSDP with prefetch, seed 1")
SLACK_GB = quoted(2.4, "GB", "CUDA context, workspaces and NCCL buffers, 1.5–3 GiB; feasibility notes, 2026", 1.6, 3.2)
DECODE = quoted(86.0, "frames/s/core", "PyAV/torchcodec, 480×640 h264 g=2, random access; data notes, 2026", 75, 98)
MTBF = quoted(50_700.0, "GPU·h", "419 unexpected interruptions in 54 days on 16 384 H100; arXiv:2407.21783, 2024")
SHARE = {"none": 0.0, "half": 0.5, "full": 1.0}


@dataclass(frozen=True)
class Case:
    """One run, ready to compute with. `node_batch` is the batch of one node."""

    request: Request
    name: str
    model: ModelConfig
    gpu: Gpu
    nodes: int
    batch: int
    dead: Dead
    ema: bool
    anchors: Anchors | None
    fit: Fit | None
    efficiency: Efficiency  # first principles
    anchored: Efficiency | None  # what the anchors say
    overhead: float  # s per step, first principles
    recipe_steps: int
    save_interval: int
    calibration: dict[str, Any] | None

    @property
    def gpus(self) -> int:
        return self.request.gpus

    @property
    def per_gpu(self) -> int:
        return self.batch // (self.gpus * self.nodes)

    def figure(self, option: str, default: Figure) -> Figure:
        """The user's value of an option, or the quoted one."""
        value = getattr(self.request, option)
        return default if value is None else given(value, default.unit, "--" + option.replace("_", "-"))

    def capacity(self) -> float | int:
        """Bytes a GPU has for us: what the user says is usable, or all of it."""
        return (self.request.usable_gb or self.gpu.memory) * 1e9

    def slack(self) -> float | int:
        """Bytes kept back; nothing when the user said what is usable."""
        if self.request.slack_gb is not None:
            return self.request.slack_gb * 1e9
        return 0.0 if self.request.usable_gb is not None else SLACK_GB.number * 1e9


def resolve(request: Request) -> Case:
    """The case of a request. Raises ValueError where a name, file or combination is wrong."""
    from piston.planning.seed2 import ANCHORS, NAME, with_defaults

    sizing = request.subject == NAME
    if sizing:
        request = with_defaults(request)
    run = recipe("pi05_libero" if sizing else request.subject)
    precision = {"bfloat16": {"bfloat16": request.peak_tflops}, "float32": {"float32": request.peak_tflops}}
    gpu = find_gpu(
        request.gpu, **precision[request.precision], memory=request.memory_gb, bandwidth=request.bandwidth_gbs,
        link=request.link_gbs,
    )  # fmt: skip
    shape = (
        request.cameras or len(run.model.cameras),
        request.text or run.model.max_token_len,
        request.horizon or run.model.action_horizon,
    )
    model = dataclasses.replace(reshaped(run.model, *shape), dtype=request.precision)
    nodes = request.nodes or 1
    batch = request.batch or run.train.batch_size
    check_batch(batch, request.gpus, nodes)
    anchors = read_anchors(request.anchors) if request.anchors else (ANCHORS if sizing else None)
    calibration = read_calibration(request.calibration) if request.calibration else None
    if calibration is not None and anchors is None:
        anchors = anchors_of(calibration)
    fitted = None if anchors is None else fit(anchors.points, anchors.source)
    return Case(
        request=request,
        name=request.subject,
        model=model,
        gpu=gpu,
        nodes=nodes,
        batch=batch,
        dead="scanned" if sizing else "skipped",
        ema=request.ema if request.ema is not None else run.optim.ema_decay is not None,
        anchors=anchors,
        fit=fitted,
        efficiency=_efficiency(request),
        anchored=None if anchors is None or fitted is None else _anchored(request, anchors, fitted, run.model, sizing),
        overhead=request.overhead or 0.0,
        recipe_steps=run.train.num_train_steps,
        save_interval=request.save_interval or run.train.save_interval,
        calibration=calibration,
    )


def _efficiency(request: Request) -> Efficiency:
    if request.efficiency is not None:
        return Efficiency(request.efficiency, request.efficiency, request.efficiency, "given", "--efficiency")
    return published_efficiency()


def _anchored(request: Request, anchors: Anchors, fitted: Fit, model: ModelConfig, sizing: bool) -> Efficiency:
    """HFU behind the fit's slope, so that it carries over to other shapes, policies and GPUs."""
    dead: Dead = "scanned" if sizing else "skipped"
    quadratics = flop_quadratics(model, dead)
    shape = {"cameras": anchors.cameras, "text": anchors.text, "horizon": anchors.horizon}
    executed = executed_flops(quadratics, shape | {"share": SHARE[request.checkpointing]})
    peak = anchors.gpus * find_gpu(anchors.gpu).peak(request.precision) * 1e12
    value = executed / (fitted.slope * peak)
    spread = 0.2 if fitted.slope_error is None else min(fitted.slope_error / fitted.slope, 0.95)
    source = f"{anchors.source}: {fitted.method}"
    return Efficiency(value, value * (1 - spread), value * (1 + spread), "measured", source)


CALIBRATION_SCHEMA = "piston.profile/1"
STAGES = ("data", "h2d", "forward", "backward", "communication", "optimizer", "host")


def read_calibration(path: Path) -> dict[str, Any]:
    """A profile's JSON: gpu, gpus, batch, cameras, text, horizon, step_s, and seconds per stage in `stages_s`."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read calibration {path}: {error.strerror}; give the JSON of a profile") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"calibration {path} is not JSON: {error.msg} at line {error.lineno}; write it with `piston profile --json`"
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    require(
        schema == CALIBRATION_SCHEMA,
        f"calibration {path} has schema {schema!r}, expected {CALIBRATION_SCHEMA!r}; write it with `piston profile "
        "--json`",
    )
    numbers = ("gpus", "batch", "cameras", "text", "horizon", "step_s")
    stages = content.get("stages_s")
    for name, value in [*((n, content.get(n)) for n in numbers), *(stages.items() if isinstance(stages, dict) else ())]:
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        require(
            good and (value > 0 or name in STAGES),
            f"calibration {path}: `{name}` is {value!r}, expected a positive finite number; profile again",
        )
    require(
        isinstance(stages, dict) and set(stages) <= set(STAGES) and bool(stages),
        f"calibration {path}: `stages_s` is {stages!r}, expected seconds for some of {list(STAGES)}; profile again",
    )
    find_gpu(str(content.get("gpu")))
    return content


def anchors_of(profile: dict[str, Any]) -> Anchors:
    """A profile as one anchor: compute is forward, backward and optimizer."""
    from piston.planning.throughput import Anchor

    stages = profile["stages_s"]
    compute = sum(stages.get(n, 0.0) for n in ("forward", "backward", "optimizer"))
    point = Anchor(
        int(profile["batch"]), float(profile["step_s"]), float(compute), stages.get("data"), source="profile"
    )
    return Anchors(
        (point,), str(profile["gpu"]), int(profile["gpus"]), int(profile["cameras"]), int(profile["text"]),
        int(profile["horizon"]), "profile",
    )  # fmt: skip


def payload(case: Case) -> dict[str, Any]:
    """FLOPs and blocks of the model for `formulas`: everything that the shape sliders need."""
    units: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        model = dataclasses.replace(case.model, dtype=dtype)
        units |= {f"{dtype} {kernels}": unit_quadratics(model, kernels=kernels) for kernels in get_args(Kernels)}
    return {"flops": flop_quadratics(case.model, case.dead), "units": units}


def choices(case: Case, *, anchored: bool) -> dict[str, Any]:
    """What the user decides, as `formulas.configure` and the page's sliders know it."""
    request = case.request
    efficiency = case.anchored if anchored and case.anchored is not None else case.efficiency
    return {
        "batch": case.batch,
        "gpus": case.gpus,
        "nodes": case.nodes,
        "cameras": len(case.model.cameras),
        "text": case.model.max_token_len,
        "horizon": case.model.action_horizon,
        "precision": request.precision,
        "kernels": request.kernels,
        "checkpointing": request.checkpointing,
        "sharding": request.sharding,
        "unit": request.unit,
        "ema": int(case.ema),
        "gradients": int(request.gradients == "resident"),
        "hfu": efficiency.value,
        "overhead": case.fit.overhead if anchored and case.fit is not None else case.overhead,
        "overlap": case.figure("overlap", OVERLAP).number,
        "network": request.network_gbs or 0.0,
        "decode": 0.0 if request.cores is None else request.cores * case.figure("decode_rate", DECODE).number,
        "usable": request.usable_gb or 0.0,
        "slack": case.slack() / 1e9,
        "price": request.price or 0.0,
        "frames": 1.0,
    }


def base_numbers(case: Case) -> dict[str, int]:
    """What the model fixes: parameters, those with gradients, bytes of one camera image."""
    trained = trained_parameters(case.model)
    live = trained - (dead_parameters(case.model) if case.dead != "scanned" else 0)
    pixels = case.model.image_size[0] * case.model.image_size[1]
    return {
        "parameters": total_parameters(case.model), "optimised": trained, "trained": live, "sample_bytes": 3 * pixels,
    }  # fmt: skip


def machine(gpu: Gpu) -> dict[str, float | int]:
    """A GPU as `formulas.configure` reads it."""
    return {
        "bfloat16": gpu.bfloat16, "float32": gpu.float32, "memory": gpu.memory, "network": gpu.network or 0.0,
        "pcie": gpu.pcie, "link": gpu.link,
    }  # fmt: skip


def settings(case: Case, *, anchored: bool, choose: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The settings that `formulas` reads; `anchored`: the anchors' efficiency and overhead, else the published ones.

    `choose` replaces choices (their names are `choices`'), `changes` the settings made from them.
    """
    chosen = choices(case, anchored=anchored) | (choose or {})
    return configure(base_numbers(case), chosen, machine(case.gpu)) | changes


def model_flops(case: Case) -> Figure:
    """FLOPs of one sample's forward and backward."""
    cost = flops(case.model, case.dead)
    return derived(
        cost.model / 1e12, "TFLOP/sample", f"forward {cost.forward / 1e12:.3f} + backward {cost.backward / 1e12:.3f}"
    )


def efficiency_figure(efficiency: Efficiency) -> Figure:
    """HFU as a figure with its range."""
    make = {"given": given, "measured": None, "quoted": None}[efficiency.kind]
    if make is not None:
        return given(efficiency.value, "", efficiency.source)
    kind = measured if efficiency.kind == "measured" else quoted
    return kind(efficiency.value, "", efficiency.source, efficiency.low, efficiency.high)
