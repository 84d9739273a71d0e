"""Where the step's time goes, what binds it, and what each lever would gain."""

from dataclasses import dataclass
from typing import Any

from piston.model.cost import flops, total_parameters
from piston.planning import formulas
from piston.planning.case import DECODE, SHARE, Case, settings
from piston.planning.coefficients import reshaped
from piston.planning.corpus import SEED_RATE, SEED_SMALL_RATE
from piston.planning.figure import Cell, Figure, Section, Table, assumed, derived, measured

GB = 1e9


@dataclass(frozen=True)
class Stage:
    """One candidate limit: seconds per step, whether it runs behind the step, and the lever that moves it."""

    name: str
    seconds: float | int
    kind: str  # measured or derived
    hidden: bool
    lever: str
    how: str


def live_stages(case: Case, costs: dict[str, Any], *, anchored: bool) -> tuple[list[Stage], float | int, str]:
    """Stages, the step they belong to, and where that step comes from: profile, anchor, or first principles."""
    if case.calibration is not None:
        names = case.calibration["stages_s"].items()
        stages = [Stage(n, float(s), "measured", n in ("data", "h2d"), _lever(n), "profile") for n, s in names]
        return stages, float(case.calibration["step_s"]), f"profile at batch {case.calibration['batch']}"
    if anchored and case.anchors is not None and case.anchors.points[0].compute_s is not None:
        point = case.anchors.points[0]
        assert point.compute_s is not None
        overhead = point.wall_s - point.compute_s
        stages = [
            Stage("compute", point.compute_s, "measured", False, _lever("compute"), "anchor"),
            Stage("host overhead", overhead, "derived", False, _lever("host overhead"), "wall − compute"),
        ]
        if point.data_s is not None:
            stages.append(Stage("data loading (wait)", point.data_s, "measured", True, _lever("data"), "anchor"))
        return stages, point.wall_s, f"anchor at batch {point.batch}"
    merged = settings(case, anchored=anchored)
    found = formulas.step_seconds(costs["flops"], merged)
    stages = [
        Stage("compute", found["compute"], "derived", False, _lever("compute"), "executed FLOPs / (peak × efficiency)"),
        Stage("host overhead", found["overhead"], "derived", False, _lever("host overhead"), "--overhead"),
    ]
    return stages, found["step"], f"first principles at batch {case.batch}"


def derived_stages(case: Case, costs: dict[str, Any], *, anchored: bool) -> list[Stage]:
    """Limits that follow from the configuration: copy, decode, network, storage, checkpoints."""
    merged = settings(case, anchored=anchored)
    found = formulas.step_seconds(costs["flops"], merged)
    rate = merged["batch"] / found["step"]
    frame_set = (case.request.gb_per_hour or SEED_RATE.number) * GB / 3600 / case.request.fps
    storage = case.request.storage_gbs * GB
    checkpoint = total_parameters(case.model) * (16 if case.ema else 12) / storage
    stages = [
        Stage("host to device copy", found["copy"], "derived", True, _lever("h2d"), "uint8 images / PCIe"),
        Stage("storage reads", merged["batch"] / case.nodes * frame_set / storage, "derived", True,
              "cache at model resolution, local disks",
              f"{rate * frame_set / 1e6:.0f} MB/s for {rate:.0f} frame-sets/s"),
        Stage("checkpoint, per step", checkpoint / case.save_interval, "derived", False,
              "asynchronous saves, longer interval",
              f"{checkpoint:.0f} s every {case.save_interval} steps if it blocks"),
    ]  # fmt: skip
    moved = formulas.update_bytes(merged)
    stages.append(Stage("optimizer update", moved / (case.gpu.bandwidth * GB), "derived", True, _lever("optimizer"),
                        "bytes moved / memory bandwidth; already inside the efficiency"))  # fmt: skip
    if case.gpus > 1:
        inside = formulas.ring_seconds(4 * merged["trained"], case.gpus, case.gpu.link * GB)
        stages.append(Stage("all-reduce inside the node", inside, "derived", True, _lever("communication"),
                            "ring / link; already inside the efficiency"))  # fmt: skip
    if case.nodes > 1:
        stages.append(Stage("network between nodes, exposed", found["exposed"], "derived", False,
                            "overlap, faster ports, larger batch per node",
                            f"{found['network']:.3g} s in all"))  # fmt: skip
    if found["data"] > 0:
        stages.append(
            Stage("decode", found["data"], "derived", True, _lever("data"), "cameras × samples / (cores × rate)")
        )
    return stages


def _lever(stage: str) -> str:
    return {
        "compute": "fewer tokens (cameras, padding), less recomputation, faster kernels, more GPUs",
        "host overhead": "larger batch per step; log, average and reduce less often",
        "data": "frame cache at model resolution, more loader cores",
        "h2d": "uint8 images, pinned memory",
        "communication": "per-block units with prefetch",
        "optimizer": "fused update, sharded moments",
        "host": "compile, fewer synchronisations",
    }.get(stage, "")


def _verdict(stage: Stage, step: float | int, largest: str) -> str:
    if stage.hidden and stage.seconds < 0.5 * step:
        return "hidden behind the step"
    if stage.name == largest:
        return "binding"
    return "significant" if stage.seconds > 0.2 * step else "not it"


def section(case: Case, costs: dict[str, Any], *, anchored: bool) -> Section:
    """The bottleneck part of the report."""
    stages, step, where = live_stages(case, costs, anchored=anchored)
    exposed = [s for s in stages if not s.hidden]
    binding = max(exposed, key=lambda s: s.seconds)
    rows: list[tuple[Cell, ...]] = []
    for stage in (*stages, *derived_stages(case, costs, anchored=anchored)):
        live = stage in stages
        base = step if live else formulas.step_seconds(costs["flops"], settings(case, anchored=anchored))["step"]
        seconds = (
            measured(stage.seconds, "s", stage.how)
            if stage.kind == "measured"
            else derived(stage.seconds, "s", stage.how)
        )
        rows.append((stage.name, seconds, derived(100 * stage.seconds / base, "%", "of the step"),
                     _verdict(stage, base, binding.name), stage.how, stage.lever))  # fmt: skip
    second = sorted(exposed, key=lambda s: -s.seconds)[1:2]
    then = f", then {second[0].name} ({second[0].seconds:.3g} s)" if second and second[0].seconds > 0 else ""
    note = f"Binding at {where}: {binding.name} ({binding.seconds:.3g} s of {step:.3g} s){then}."
    figures = {
        "step": derived(step, "s", where),
        "decode cores to keep up": cores_needed(case, costs, anchored=anchored),
    }
    stages_table = Table(("stage", "time per step", "share", "verdict", "how", "lever"), tuple(rows))
    return Section(
        "bottleneck", "Bottleneck walk", figures, (stages_table, levers(case, costs, anchored=anchored)), (note,)
    )


def cores_needed(case: Case, costs: dict[str, Any], *, anchored: bool) -> Figure:
    """Cores per node that decode native video as fast as the node eats it."""
    merged = settings(case, anchored=anchored, decode=0.0)
    rate = merged["batch"] / case.nodes / formulas.step_seconds(costs["flops"], merged)["step"]
    decode = case.figure("decode_rate", DECODE)
    low, high = decode.low or decode.number, decode.high or decode.number
    frames = rate * len(case.model.cameras)
    return derived(frames / decode.number, "cores/node", f"{frames:.0f} frames/s / {decode.number:g} ({decode.source})",
                   frames / high, frames / low)  # fmt: skip


def levers(case: Case, costs: dict[str, Any], *, anchored: bool) -> Table:
    """What changing one thing gains, from the same formulas."""
    now = settings(case, anchored=anchored)
    step = formulas.step_seconds(costs["flops"], now)["step"]
    rate = now["batch"] / step

    def gain(**changes: Any) -> float | int:
        merged = now | changes
        return merged["batch"] / formulas.step_seconds(costs["flops"], merged)["step"] / rate

    rows: list[tuple[Cell, ...]] = []

    def row(what: str, value: float | int, how: str, kind: str = "derived") -> None:
        figure = derived(value, "× throughput", how) if kind == "derived" else assumed(value, "× throughput", how)
        rows.append((what, figure, how))

    start = case.anchors.points[0].batch if anchored and case.anchors is not None else None
    if start is not None and start != case.batch / case.nodes:
        row(f"batch {start} → {case.batch // case.nodes} per node", 1 / gain(batch=start * case.nodes),
            "amortises the fixed part of the step")  # fmt: skip
    row("batch × 2", gain(batch=2 * case.batch), "only if memory allows")
    if now["overhead"] > 0:
        row("host overhead halved", gain(overhead=now["overhead"] / 2), "log, average, reduce less often")
    cameras, text = int(now["cameras"]), int(now["text"])
    if cameras > 1:
        row(
            f"{cameras} → {cameras - 1} cameras",
            gain(cameras=cameras - 1),
            "executed FLOPs; exact if the slot is unused",
        )
    if text > 64:
        row(f"text {text} → 64 tokens", gain(text=64), "executed FLOPs; exact where it is padding")
    for name, share in SHARE.items():
        if share < now["share"]:
            row(f"checkpointing {name}", gain(share=share), "if memory allows")
    if case.dead != "skipped":
        model = reshaped(case.model, cameras, text, int(now["horizon"]))
        ratio = flops(model, case.dead).model / flops(model, "skipped").model
        row("skip the dead last-layer work", ratio, "exact: nothing reads it")
    native = case.request.gb_per_hour or SEED_RATE.number
    small = case.request.gb_per_hour_small or SEED_SMALL_RATE.number
    saved = derived(native / small, "× less storage", "GB per hour, native / re-encoded")
    rows.append(("data re-encoded at model resolution", saved, "and no decoding of large frames"))
    row("one node more", (case.nodes + 1) / case.nodes, "linear; see the scenarios for the band")
    products = _linear_share(case)
    row("fp8 in linear layers", 1 / (1 - products + products / 2),
        f"upper bound: {products:.0%} of FLOPs at twice the rate; changes the algorithm", "assumed")  # fmt: skip
    return Table(("lever", "gain", "why"), tuple(rows), "Levers, one at a time")


def _linear_share(case: Case) -> float | int:
    from piston.model.cost import attentions

    total = flops(case.model, case.dead)
    attention = sum(a.forward + a.backward(True) for a in attentions(case.model, case.dead))
    return 1 - attention / total.model
