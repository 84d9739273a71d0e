"""From one node to N: what travels, how long that takes, how much hides, which parallelism applies."""

from typing import Any

from piston.planning import formulas
from piston.planning.backtest import Bands
from piston.planning.case import MTBF, OVERLAP, Case, settings
from piston.planning.figure import Cell, Figure, Section, Table, assumed, derived, given, quoted
from piston.planning.memory import largest, usage

GB = 1e9


def node_counts(most: int) -> list[int]:
    """1, 2, 4, … up to `most`, and `most` itself."""
    counts = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return counts if counts[-1] == most else [*counts, most]


def node_rate(case: Case, costs: dict[str, Any], *, anchored: bool) -> float | int:
    """Samples per second of one node at the case's share of the batch, without any network."""
    return formulas.node_rate(costs["flops"], settings(case, anchored=anchored))


def rate_at(case: Case, costs: dict[str, Any], nodes: int, share: float | int, *, anchored: bool) -> float | int:
    """Samples per second of `nodes` nodes that each keep their batch, at `share` of linear."""
    return node_rate(case, costs, anchored=anchored) * nodes * (share if nodes > 1 else 1.0)


def network_share(
    case: Case, costs: dict[str, Any], nodes: int, *, anchored: bool, overlap: float | int | None = None
) -> float | int:
    """Share of linear that the all-reduce alone leaves."""
    merged = settings(case, anchored=anchored, nodes=nodes, batch=case.batch / case.nodes * nodes)
    if overlap is not None:
        merged["overlap"] = overlap
    stages = formulas.step_seconds(costs["flops"], merged)
    return (stages["step"] - stages["exposed"]) / stages["step"]


def section(case: Case, costs: dict[str, Any], frames: float | int, bands: Bands, *, anchored: bool) -> Section:
    """The scenarios part of the report."""
    request = case.request
    low, middle, high = bands.scaling
    port = request.network_gbs or case.gpu.network
    rows: list[tuple[Cell, ...]] = []
    for nodes in node_counts(max(request.max_nodes, case.nodes)):
        merged = settings(case, anchored=anchored, nodes=nodes, batch=case.batch / case.nodes * nodes)
        stages = formulas.step_seconds(costs["flops"], merged)
        ideal = formulas.days(frames, rate_at(case, costs, nodes, 1.0, anchored=anchored))
        spread = (None, None) if nodes == 1 else (ideal / high, ideal / low)
        real = ideal if nodes == 1 else ideal / middle
        travels = 2 * (nodes - 1) / nodes * 4 * merged["trained"] / GB
        alone = network_share(case, costs, nodes, anchored=anchored)
        unknown = port is None and nodes > 1
        rows.append(
            (
                str(nodes), derived(merged["batch"], "samples", "the node's batch kept"),
                derived(frames / merged["batch"], "steps"), derived(travels, "GB", "ring, float32 gradients, per node"),
                "network not given" if unknown else derived(stages["network"], "s", "ring / network"),
                "network not given" if unknown else derived(100 * alone, "%"),
                derived(ideal, "days", "linear"), derived(real, "days", "published share of linear", *spread),
            )
        )  # fmt: skip
    columns = ("nodes", "global batch", "steps", "travels per step", "network time", "network alone leaves", "ideal",
               "expected")  # fmt: skip
    figures: dict[str, Figure] = {
        "network per GPU": _port(case),
        "overlap": case.figure("overlap", OVERLAP),
        "share of linear at 32 nodes": quoted(middle, "", "published: RLinf + Baige, LingBot, 8 → 256 GPUs", low, high),
        "parallelism": derived(case.nodes * case.gpus, "GPUs", _parallelism(case, costs)),
        **_failures(case, frames, costs, anchored=anchored),
    }
    notes = (
        _parallelism(case, costs),
        "The global batch grows with the nodes and the steps shrink: the same timesteps need not give the same model.",
        "The published share includes stragglers and storage, at 32 nodes; fewer nodes lose less.",
    )
    return Section("scenarios", "Scenarios", figures, (Table(columns, tuple(rows)),), notes)


def _port(case: Case) -> Figure:
    if case.request.network_gbs is not None:
        return given(case.request.network_gbs, "GB/s", "--network-gbs")
    if case.gpu.network is None:
        return Figure(None, "GB/s", "not reported", f"no usual network for {case.gpu.name}: give --network-gbs")
    return assumed(
        case.gpu.network, "GB/s", f"one port per GPU, as in the vendor's {case.gpu.name} machine: --network-gbs"
    )


def _parallelism(case: Case, costs: dict[str, Any]) -> str:
    """Which parallelism applies, and why."""
    room = case.capacity() - case.slack()
    plain = usage(case, costs, sharding="none")["peak"]
    if plain <= room:
        return (
            f"Data parallel: one GPU holds the whole step ({plain / GB:.0f} of {room / GB:.0f} GB), so replicas only "
            "exchange gradients. Tensor or pipeline parallelism would add traffic for nothing at this size."
        )
    if case.gpus > 1 and usage(case, costs, sharding="hsdp")["peak"] <= room:
        return (
            f"HSDP: a replica does not fit one GPU ({plain / GB:.0f} of {room / GB:.0f} GB) and fits when sharded "
            "inside a "
            "node: gathers stay on the fast links, gradients alone cross nodes."
        )
    batch = largest(case, costs, sharding="fsdp")
    if batch >= 1:
        return f"FSDP over all GPUs with at most {batch} samples per GPU: nothing less sharded fits this batch."
    return "Nothing fits on these GPUs: see the memory section for the least that is needed."


def _failures(case: Case, frames: float | int, costs: dict[str, Any], *, anchored: bool) -> dict[str, Figure]:
    rate = rate_at(case, costs, case.nodes, 1.0, anchored=anchored)
    gpu_hours = formulas.days(frames, rate) * 24 * case.gpus * case.nodes
    mtbf = case.figure("mtbf_hours", MTBF)
    return {
        "expected failures": derived(
            gpu_hours / mtbf.number, "", f"{gpu_hours:,.0f} GPU·h / {mtbf.number:,.0f} ({mtbf.source})"
        )
    }
