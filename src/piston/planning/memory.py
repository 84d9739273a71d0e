"""Will it fit: state, activations, the peak of each phase; the largest batch per strategy; how to fit."""

from dataclasses import dataclass
from typing import Any, get_args

from piston.model.cost import total_parameters
from piston.planning import formulas
from piston.planning.backtest import Bands
from piston.planning.case import SHARE, SLACK_GB, Case, payload, settings
from piston.planning.figure import Cell, Figure, Section, Table, derived, given, measured, quoted
from piston.planning.request import Sharding

GB = 1e9
MOST_SAMPLES = 4096


def usage(
    case: Case, costs: dict[str, Any], *, samples: float | int | None = None, **choose: Any
) -> dict[str, float | int]:
    """Bytes by category and phase on one GPU, with some choices replaced."""
    merged = settings(case, anchored=False, choose=choose)
    if samples is not None:
        merged["samples"] = samples
    return formulas.memory(costs["units"][merged["precision"]], merged)


def largest(case: Case, costs: dict[str, Any], **choose: Any) -> int:
    """Most samples per GPU that fit, with some choices replaced."""
    merged = settings(case, anchored=False, choose=choose)
    units = costs["units"][merged["precision"]]
    return formulas.largest_batch(units, merged, merged["capacity"] - merged["slack"], MOST_SAMPLES)


@dataclass(frozen=True)
class Change:
    """One way to use less memory: what to set, what it costs in time, what it saves."""

    option: str
    slower: float  # relative step time added, before overlap
    settings: dict[str, Any]
    remark: str = ""


def changes(case: Case) -> list[Change]:
    """Ways to use less memory that this case does not use yet, cheapest first."""
    request = case.request
    world = case.gpus * case.nodes
    now = settings(case, anchored=False)
    flops = payload(case)["flops"]
    executed = formulas.executed_flops(flops, now)
    options: list[Change] = []
    if request.kernels != "compiled":
        remark = "fused kernels keep less; usually faster too"
        options.append(Change("--kernels compiled", 0.0, {"kernels": "compiled"}, remark))
    for name, share in SHARE.items():
        if share > SHARE[request.checkpointing]:
            more = formulas.executed_flops(flops, now | {"share": share}) / executed - 1
            options.append(Change(f"--checkpointing {name}", more, {"checkpointing": name}, "recomputes in backward"))
    if world > 1 and request.sharding in ("none", "ddp"):
        options.append(Change("--sharding zero1", 0.0, {"sharding": "zero1"}, "same traffic as an all-reduce"))
    if world > 1 and request.sharding != "fsdp":
        gather = 2 * now["compute_bytes"] * now["parameters"] / (case.gpu.link * GB)
        exposed = gather * (1 - now["overlap"]) / formulas.step_seconds(flops, now)["step"]
        options.append(Change("--sharding fsdp", exposed, {"sharding": "fsdp"}, "gathers weights twice a step"))
        both = exposed + formulas.executed_flops(flops, now | {"share": 1.0}) / executed - 1
        if request.checkpointing != "full":
            together = {"sharding": "fsdp", "checkpointing": "full"}
            options.append(Change("--sharding fsdp --checkpointing full", both, together))
    half = case.per_gpu // 2
    if half >= 1 and case.per_gpu % 2 == 0:
        remark = "same global batch by accumulation (--train.accumulate 2)"
        options.append(Change("micro-batch halved", 0.0, {"samples": half}, remark))
    if case.ema:
        options.append(Change("--ema False", 0.0, {"ema": 0}, "changes the result: evaluation uses the last weights"))
    return sorted(options, key=lambda c: c.slower)


def _gb(value: float | int, how: str = "", band: tuple[float | int, float | int] | None = None) -> Figure:
    low, high = (value * band[0] / GB, value * band[1] / GB) if band else (None, None)
    return derived(value / GB, "GB", how, low, high)


def _capacity(case: Case) -> Figure:
    if case.request.usable_gb is not None:
        return given(case.request.usable_gb, "GB", "--usable-gb")
    return quoted(case.gpu.memory, "GB", case.gpu.source)


def section(case: Case, costs: dict[str, Any], bands: Bands) -> Section:
    """The memory part of the report."""
    used = usage(case, costs)
    params = total_parameters(case.model)
    capacity, slack = case.capacity(), case.slack()
    kept = f"{case.per_gpu} samples, {case.request.kernels}, checkpointing {case.request.checkpointing}"
    figures = {
        "weights": _gb(used["weights"], f"{params:,} × 4 B"),
        "moments": _gb(used["moments"], "Adam: trained × 8 B"),
        "ema": _gb(used["ema"], "weights × 4 B" if case.ema else "off"),
        "gradients": _gb(used["gradients"], f"{case.request.gradients}, trained × 4 B"),
        "images": _gb(used["images"], "float32 on the device"),
        "saved by forward": _gb(used["saved"], kept),
        "peak in forward": _gb(used["forward"]),
        "peak in backward": _gb(used["backward"], "activations shrink while gradients grow, block by block"),
        "at the update": _gb(used["update"]),
        "peak": _gb(used["peak"], "the largest phase, not the sum", bands.memory),
        "capacity": _capacity(case),
        "slack": given(slack / GB, "GB", "--slack-gb or --usable-gb") if slack != SLACK_GB.number * GB else SLACK_GB,
        "largest batch per GPU": derived(largest(case, costs), "samples", "peak + slack ≤ capacity"),
    }  # fmt: skip
    room = capacity - slack
    verdict = _verdict(case, costs, used["peak"], room)
    return Section("memory", "Memory per GPU", figures, (_strategies(case, costs), _ways(case, costs, room)), verdict)


def _verdict(case: Case, costs: dict[str, Any], peak: float | int, room: float | int) -> tuple[str, ...]:
    remark = (
        "Not counted in the peak: CUDA context, library buffers, allocator rounding (the slack). Eager figures "
        "assume a "
        "fused masked attention; where PyTorch falls back to its math kernel, scores add 2·heads·N² per layer and "
        "sample."
    )
    if peak <= room:
        return (f"It fits: {peak / GB:.1f} GB of {room / GB:.1f} GB.", remark)
    fitting = [c for c in changes(case) if usage(case, costs, **c.settings)["peak"] <= room]
    if fitting:
        best = fitting[0]
        return (
            f"It does not fit: {peak / GB:.1f} GB, {room / GB:.1f} GB usable. Cheapest single change: {best.option} "
            f"({usage(case, costs, **best.settings)['peak'] / GB:.1f} GB, {best.slower:+.0%} step time).",
            remark,
        )
    least = usage(case, costs, samples=1, sharding="fsdp", checkpointing="full")["peak"]
    return (
        f"It does not fit: {peak / GB:.1f} GB, {room / GB:.1f} GB usable, and no single change makes it fit. The least "
        f"this model needs on {case.gpus * case.nodes} GPUs is {least / GB:.1f} GB per GPU (FSDP, full "
        "checkpointing, one "
        "sample): take more or larger GPUs, or a LoRA variant.",
        remark,
    )


def _strategies(case: Case, costs: dict[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    alone = case.gpus * case.nodes == 1
    policies = ["none"] if alone else [*get_args(Sharding), "fsdp, one unit"]
    for label in policies:
        policy, _, single = label.partition(", ")
        for name in SHARE:
            choice = {"sharding": policy, "unit": "single" if single else "block", "checkpointing": name}
            most = derived(largest(case, costs, **choice), "samples", "peak + slack ≤ capacity")
            rows.append((label, name, _gb(usage(case, costs, **choice)["peak"]), most))
    return Table(("sharding", "checkpointing", "peak", "largest per GPU"), tuple(rows), "Strategies")


def _ways(case: Case, costs: dict[str, Any], room: float | int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for change in changes(case):
        peak = usage(case, costs, **change.settings)["peak"]
        slower = derived(100 * change.slower, "%", "executed FLOPs or exposed traffic")
        rows.append((change.option, _gb(peak), slower, "yes" if peak <= room else "no", change.remark))
    return Table(("change", "peak", "step time", "fits", "remark"), tuple(rows), "To use less, cheapest first")


def traced_section(case: Case, costs: dict[str, Any]) -> Section:
    """The same step traced on the real model, beside the analytic figures. Imports torch."""
    from piston.planning.trace import trace

    request = case.request
    ranks = 1 if request.sharding in ("none",) else case.gpus * case.nodes
    found = trace(case.model, case.per_gpu, checkpointing=request.checkpointing, ema=case.ema, ranks=ranks)
    mine = usage(case, costs, kernels="eager", sharding="none", gradients=1)
    source = f"real model under fake tensors, eager, one device, {found.seconds:.0f} s"
    pairs = (
        ("at the end of forward", found.forward_end, mine["forward_end"]),
        ("peak", found.peak, mine["peak"]),
    )
    rows = tuple(
        (name, measured(a / GB, "GB", source), _gb(b), derived(100 * (b / a - 1), "%", "analytic / traced − 1"))
        for name, a, b in pairs
    )
    table = Table(("", "traced", "analytic", "difference"), rows)
    return Section("traced", "Traced memory", {"seconds": measured(found.seconds, "s", source)}, (table,))
