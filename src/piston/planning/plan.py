"""The whole plan: a request in, the sections of the report out."""

from dataclasses import dataclass, field
from typing import Any

from piston.model.cost import flops_by_module, parameters, recompute, total_parameters
from piston.planning import backtest, bottleneck, corpus, formulas, landscape, memory, roofline, scaling, seed2, target
from piston.planning.backtest import Bands
from piston.planning.case import Case, efficiency_figure, model_flops, payload, resolve, settings
from piston.planning.figure import NOT_REPORTED, Cell, Figure, Section, Table, derived, given, quoted, short
from piston.planning.request import Request
from piston.planning.target import Answer


@dataclass(frozen=True)
class Plan:
    """The case, its costs, and the report's sections in reading order."""

    case: Case
    costs: dict[str, Any]
    answer: Answer
    bands: Bands
    sections: tuple[Section, ...]
    anchored: bool
    headline: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Sections by key, each figure with kind, source and band."""
        return {
            "schema": "piston.plan/1",
            "subject": self.case.name,
            "headline": list(self.headline),
            **{section.key: section.to_json() for section in self.sections},
        }


def make_plan(request: Request) -> Plan:
    """Plans the request. Raises ValueError where it cannot be met or read."""
    case = resolve(request)
    request = case.request
    costs = payload(case)
    bands = backtest.bands()
    anchored = case.fit is not None
    found = corpus.measure(request.data) if request.data is not None else None

    one = scaling.node_rate(case, costs, anchored=anchored)

    def rate(nodes: int) -> float | int:
        return one * nodes * (bands.scaling[1] if nodes > 1 else 1.0)

    frames = target.work_frames(request, case.batch, corpus.corpus_frames(request, found), case.recipe_steps)
    answer = target.solve(request, frames, rate, case.gpus)
    sections = [
        _model(case),
        memory.section(case, costs, bands),
        *([memory.traced_section(case, costs)] if request.trace else []),
        _throughput(case, costs, bands),
        _target(case, answer, bands, anchored),
        corpus.section(case, answer.frames, found),
        scaling.section(case, costs, answer.frames, bands, anchored=anchored),
        bottleneck.section(case, costs, anchored=anchored),
        _money(case, answer, _day_band(case, answer, bands, anchored)),
        landscape.section(),
        backtest.section(),
    ]
    if request.subject == seed2.NAME:
        from piston.planning import seed_report

        sections.insert(0, seed_report.section(case, costs))
    return Plan(case, costs, answer, bands, tuple(sections), anchored, _headline(case, sections, answer))


def _headline(case: Case, sections: list[Section], answer: Answer) -> tuple[str, ...]:
    by_key = {s.key: s for s in sections}
    return (
        by_key["memory"].notes[0],
        f"{short(answer.frames)} timesteps on {answer.nodes} node(s) of {case.gpus} × {case.gpu.name}: "
        f"{by_key['target'].figures['days'].text()}.",
        by_key["bottleneck"].notes[0],
    )


def _model(case: Case) -> Section:
    counts, costs = parameters(case.model), flops_by_module(case.model, case.dead)
    rows: list[tuple[Cell, ...]] = [
        (name, derived(counts[name], "parameters"), derived(costs[name].forward / 1e12, "TFLOP"),
         derived(costs[name].backward / 1e12, "TFLOP"))
        for name in counts
    ]  # fmt: skip
    again = recompute(case.model, case.dead, prefix_last=case.dead == "scanned")
    figures = {
        "parameters": derived(total_parameters(case.model), "", "layer shapes; equal to the model's own count"),
        "cameras": given(len(case.model.cameras), "slots", "recipe or --cameras"),
        "text": given(case.model.max_token_len, "tokens", "recipe or --text"),
        "horizon": given(case.model.action_horizon, "steps", "recipe or --horizon"),
        "FLOPs per sample": model_flops(case),
        "recomputed by full checkpointing": derived(again / 1e12, "TFLOP/sample", "as executed"),
    }
    table = Table(("module", "parameters", "forward", "backward"), tuple(rows))
    note = f"FLOPs are matrix products of one training sample; the dead last-layer work is {case.dead}."
    return Section("model", "Model and cost of a sample", figures, (table,), (note,))


def _throughput(case: Case, costs: dict[str, Any], bands: Bands) -> Section:
    """Both ways, side by side where both exist."""
    figures: dict[str, Figure] = {}
    rows: list[tuple[Cell, ...]] = []
    for name in ("anchors", "first principles"):
        anchored = name == "anchors"
        if anchored and case.fit is None:
            continue
        merged = settings(case, anchored=anchored)
        stages = formulas.step_seconds(costs["flops"], merged)
        rate = merged["batch"] / stages["step"]
        low, high = rate_band(case, rate, bands, anchored=anchored)
        efficiency = case.anchored if anchored and case.anchored is not None else case.efficiency
        figures[f"samples/s, {name}"] = derived(rate, "samples/s", "batch / step", low, high)
        figures[f"s/step, {name}"] = derived(
            stages["step"], "s", "stages", merged["batch"] / high, merged["batch"] / low
        )
        figures[f"efficiency, {name}"] = efficiency_figure(efficiency)
        rows.append((name, figures[f"samples/s, {name}"], derived(rate / case.gpus / case.nodes, "samples/s/GPU"),
                     figures[f"s/step, {name}"], efficiency_figure(efficiency)))  # fmt: skip
    columns = ("method", "rate", "per GPU", "step", "share of peak (HFU)")
    tables = [Table(columns, tuple(rows)), roofline.table(case)]
    if case.fit is not None:
        figures |= _fit_figures(case)
        tables.append(_curve(case))
    peak = case.gpu.peak(case.request.precision)
    figures["peak"] = (
        given(peak, "TFLOP/s", "--peak-tflops")
        if case.request.peak_tflops
        else quoted(peak, "TFLOP/s", case.gpu.source)
    )
    executed = formulas.executed_flops(costs["flops"], settings(case, anchored=False))
    ceiling = (case.gpu.measured or peak) * 1e12 / executed
    figures["ceiling per GPU"] = derived(
        ceiling, "samples/s", case.gpu.measured_source or f"datasheet peak, {case.gpu.source}"
    )
    notes = (
        "HFU: share of the datasheet's dense peak that executed FLOPs reach, recomputation included, everything else "
        "in "
        "the step counted against it.",
        "Trainers differ more than machines do: without a measurement of your own the band is that of the published "
        "ones.",
    )
    return Section("throughput", "Throughput", figures, tuple(tables), notes)


def rate_band(case: Case, rate: float | int, bands: Bands, *, anchored: bool) -> tuple[float | int, float | int]:
    """Samples per second, low and high: the fit's interval, the note's ± 20 % for one anchor, or the backtest's."""
    if anchored and case.fit is not None:
        error = case.fit.wall_error(case.batch / case.nodes)
        wall = case.fit.wall(case.batch / case.nodes)
        if error is not None and error < wall:
            return rate * wall / (wall + error), rate * wall / (wall - error)
        return rate * (1 - seed2.THROUGHPUT_BAND), rate * (1 + seed2.THROUGHPUT_BAND)
    if case.request.efficiency is not None:
        return rate, rate
    return rate * bands.rate[0], rate * bands.rate[1]


def _fit_figures(case: Case) -> dict[str, Figure]:
    assert case.fit is not None
    found, how = case.fit, case.fit.method
    slope, overhead = found.slope_error, found.overhead_error
    return {
        "slope": derived(found.slope, "s/sample", how, *_around(found.slope, slope)),
        "overhead": derived(found.overhead, "s", how, *_around(found.overhead, overhead)),
        "anchor points": given(found.points, "", case.anchors.source if case.anchors else ""),
        **({"curve": derived(found.curve, "s/sample²", how)} if found.curve else {}),
    }


def _around(value: float | int, error: float | int | None) -> tuple[float | int | None, float | int | None]:
    return (None, None) if error is None else (value - error, value + error)


def _curve(case: Case) -> Table:
    assert case.fit is not None
    rows: list[tuple[Cell, ...]] = []
    for batch in sorted({64, 256, 1024, 2048, 4096, case.batch // case.nodes}):
        error, wall = case.fit.wall_error(batch), case.fit.wall(batch)
        rows.append(
            (
                str(batch),
                derived(wall, "s", "fit", *_around(wall, error)),
                derived(case.fit.rate(batch), "samples/s", "fit"),
            )
        )
    ceiling = derived(1 / case.fit.slope, "samples/s", "1 / slope") if not case.fit.curve else NOT_REPORTED
    rows.append(("∞", "", ceiling))
    return Table(("node batch", "step", "rate"), tuple(rows), "The fit on the anchors' own shape, one node")


def _day_band(case: Case, answer: Answer, bands: Bands, anchored: bool) -> tuple[float | int, float | int]:
    """Days, low and high: the throughput band, and between nodes the published spread around its middle."""
    low, high = rate_band(case, 1.0, bands, anchored=anchored)
    share_low, share, share_high = bands.scaling
    if answer.nodes > 1:
        low, high = low * share_low / share, high * share_high / share
    return answer.days / high, answer.days / low


def _target(case: Case, answer: Answer, bands: Bands, anchored: bool) -> Section:
    low, high = _day_band(case, answer, bands, anchored)
    seen: tuple[float | int | None, ...] = (None, None)
    if answer.solved == "timesteps":  # the days are given: what is uncertain is how much they see
        seen = (answer.frames * answer.days / high, answer.frames * answer.days / low)
        low = high = answer.days
    batch = case.batch // case.nodes * answer.nodes
    how = answer.how if answer.solved == "timesteps" else "steps × batch"
    contended = [answer.days * (1 + margin) for margin in seed2.WALL_MARGIN]
    figures = {
        "timesteps": derived(answer.frames, "frames", how, *seen),
        "nodes": derived(answer.nodes, "", answer.how if answer.solved == "nodes" else "given"),
        "global batch": derived(batch, "samples", "the node's batch kept"),
        "steps": derived(formulas.steps_for(answer.frames, batch), "steps", "timesteps / global batch"),
        "days": derived(answer.days, "days", answer.how, low, high),
        "GPU-hours": derived(answer.days * 24 * case.gpus * answer.nodes, "GPU·h", "days × GPUs",
                             low * 24 * case.gpus * answer.nodes, high * 24 * case.gpus * answer.nodes),
        "days with contention": derived(contended[0], "days", "wall-clock margin 25–50 %, seed 2", *contended),
    }  # fmt: skip
    solved = f"Solved for {answer.solved}: {answer.how}."
    return Section("target", "Target", figures, (), (solved,))


def _money(case: Case, answer: Answer, band: tuple[float | int, float | int]) -> Section:
    if case.request.price is None:
        note = "No price given, so no money: Piston ships none. Give what a GPU-hour costs you with --price."
        return Section("money", "Money", {"cost": NOT_REPORTED}, (), (note,))
    price = case.request.price
    hourly = 24 * case.gpus * answer.nodes * price
    figures = {
        "price": given(price, "per GPU·h", "--price"),
        "cost": derived(answer.days * hourly, "", "GPU-hours × price", band[0] * hourly, band[1] * hourly),
    }
    return Section(
        "money", "Money", figures, (), ("In whatever unit the price is in; storage and traffic not included.",)
    )
