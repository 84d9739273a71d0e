"""How far to trust the plan: its error against everything published, and the bands that come from it."""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from piston.config.recipes import PI0, PI05
from piston.config.schema import GEMMA_VARIANTS, ModelConfig, require
from piston.model.cost import dead_parameters, flops, recompute, total_parameters, trained_parameters
from piston.planning import formulas
from piston.planning.coefficients import reshaped, unit_quadratics
from piston.planning.figure import NOT_REPORTED, Cell, Section, Table, derived, quoted
from piston.planning.gpus import find_gpu
from piston.planning.published import MEMORIES, RATES, SCALINGS, WALL_CLOCKS, Memory, WallClock
from piston.planning.throughput import executed_per_sample, published_efficiency, reached

GB = 1e9


@dataclass(frozen=True)
class Error:
    """Predicted against published: `relative` = predicted/published − 1. `counts`: enters median, worst and bands."""

    quantity: str
    name: str
    predicted: float | int | None
    published: float | int
    unit: str
    counts: bool
    source: str
    remark: str = ""

    @property
    def relative(self) -> float | int | None:
        return None if self.predicted is None else self.predicted / self.published - 1


@dataclass(frozen=True)
class Bands:
    """Factors (low, high) on a prediction, from the errors of the same kind of prediction."""

    rate: tuple[float | int, float | int]
    memory: tuple[float | int, float | int]
    scaling: tuple[float | int, float | int, float | int]  # low, middle, high share of linear


def rate_errors() -> list[Error]:
    """Each system's throughput from the median efficiency of the others (leave one out)."""
    result = []
    for rate in RATES:
        own, executed = reached(rate), executed_per_sample(rate)
        if own is None or executed is None or rate.gpu is None:
            result.append(
                Error("throughput", rate.name, None, rate.per_gpu, "samples/s/GPU", False, rate.source, rate.note)
            )
            continue
        others = published_efficiency(without=rate.system).value
        predicted = others * find_gpu(rate.gpu).bfloat16 * 1e12 / executed
        result.append(
            Error("throughput", rate.name, predicted, rate.per_gpu, "samples/s/GPU", True, rate.source, rate.note)
        )
    return result


def _hours(clock: WallClock) -> float | int | None:
    if clock.why_not or clock.gpu is None or clock.cameras is None or clock.text is None or clock.horizon is None:
        return None
    config = reshaped(PI05, clock.cameras, clock.text, clock.horizon)
    executed = flops(config, clock.dead).model + recompute(config, clock.dead, prefix_last=clock.dead == "scanned")
    rate = (
        published_efficiency(without=clock.system).value * find_gpu(clock.gpu).bfloat16 * 1e12 / executed * clock.gpus
    )
    return clock.steps * clock.batch / rate / 3600


def wall_errors() -> list[Error]:
    """Each published run's hours from the median efficiency of the other systems."""
    return [
        Error("wall-clock", c.name, _hours(c), c.hours, "h", _hours(c) is not None, c.source, c.why_not)
        for c in WALL_CLOCKS
    ]


def _lora(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config, paligemma=GEMMA_VARIANTS["gemma_2b_lora"], action_expert=GEMMA_VARIANTS["gemma_300m_lora"]
    )


def predicted_memory(row: Memory, *, share: float | int | None = None) -> float | int:
    """GB per GPU of a published configuration. JAX rematerialises every block; the DDP port keeps everything."""
    base = PI05 if row.pi05 else PI0
    config = reshaped(_lora(base) if row.lora else base, row.cameras, row.text, row.horizon)
    jax = row.style.startswith("jax")
    total, trained = total_parameters(config), trained_parameters(config)
    checkpointed = (1.0 if jax or row.style == "fsdp" else 0.0) if share is None else share
    resident = row.style != "jax transient"
    shards = 8 if row.style == "fsdp" else 1
    settings = {
        "parameters": total, "optimised": trained, "trained": trained - (0 if jax else dead_parameters(config)),
        "ema": int(row.ema),
        "weight_shards": shards, "optimizer_shards": shards, "gradient_shards": shards,
        "gradients": int(resident), "single_unit": 0, "block_units": int(shards > 1),
        "buckets": int(row.style == "ddp stock"),
        "compute_bytes": 2, "sample_bytes": 3 * 224 * 224,
        "casts": 0 if jax or shards > 1 else 1, "share": checkpointed,
        "cameras": row.cameras, "text": row.text, "horizon": row.horizon, "samples": row.samples,
    }  # fmt: skip
    units = unit_quadratics(config, kernels="xla" if jax else "stock")
    peak = formulas.memory(units, settings)["peak"]
    frozen = 2 * (total - trained) - 4 * (total - trained) if row.lora else 0  # openpi keeps frozen weights in bfloat16
    return (peak + frozen) / GB


def memory_errors() -> list[Error]:
    """Peak per GPU. A README's requirements, and runs whose checkpointing is not stated, do not count."""
    result = []
    for row in MEMORIES:
        predicted: float | int | None = predicted_memory(row)
        remark = row.note
        if row.style == "fsdp":
            remark += f"; between {predicted:.1f} (full checkpointing) and {_unchecked(row):.1f} GB (none)"
            predicted = None
        if row.kind == "requirement":
            remark += ": consistent" if predicted is not None and predicted <= row.gigabytes else ": too small"
        counts = row.known and row.kind == "measured"
        result.append(Error("memory", row.name, predicted, row.gigabytes, "GB", counts, row.source, remark))
    return result


def _unchecked(row: Memory) -> float | int:
    return predicted_memory(row, share=0.0)


def scaling_errors() -> list[Error]:
    """Share of linear at 256 GPUs, recomputed from the two rates, against the network alone where steps are known."""
    result = []
    for row in SCALINGS:
        share = (row.rates[1] / row.gpus[1]) / (row.rates[0] / row.gpus[0])
        predicted = None
        remark = "step time and network not stated"
        if row.step_seconds is not None:
            nodes = row.gpus[1] // row.gpus[0]
            config = reshaped(PI05, 2, 200, 10)
            port = find_gpu("H100").network or 0.0
            seconds = formulas.ring_seconds(4 * total_parameters(config) / row.gpus[0], nodes, port * 1e9)
            predicted = row.step_seconds / (row.step_seconds + seconds)
            remark = f"no overlap assumed, {port:.0f} GB/s per GPU assumed"
        if row.stated is not None:
            remark += f"; the source states {row.stated:.1%}, its own figures give {share:.1%}"
        result.append(
            Error("scaling", row.name, predicted, share, "of linear", predicted is not None, row.source, remark)
        )
    return result


def profile_errors(folder: Path) -> list[Error]:
    """Every profile in a folder: its measured rate against first principles with the published median."""
    from piston.planning.case import read_calibration

    require(
        folder.is_dir(), f"--profiles {folder} is no folder; give one with the JSON files of `piston profile --json`"
    )
    result = []
    for path in sorted(folder.glob("*.json")):
        if json.loads(path.read_text()).get("schema") != "piston.profile/1":
            continue
        content = read_calibration(path)
        config = reshaped(PI05, int(content["cameras"]), int(content["text"]), int(content["horizon"]))
        executed = flops(config).model + recompute(config)
        peak = find_gpu(str(content["gpu"])).bfloat16 * 1e12
        measured = content["batch"] / content["step_s"] / content["gpus"]
        predicted = published_efficiency().value * peak / executed
        result.append(Error("throughput", path.name, predicted, measured, "samples/s/GPU", True, str(path), "profile"))
    return result


def all_errors(folder: Path | None = None) -> list[Error]:
    """Everything comparable."""
    errors = [*rate_errors(), *wall_errors(), *memory_errors(), *scaling_errors()]
    return errors + (profile_errors(folder) if folder is not None else [])


def bands(errors: list[Error] | None = None) -> Bands:
    """What published/predicted was, as factors on the next prediction."""
    errors = all_errors() if errors is None else errors

    def factors(quantity: str) -> list[float | int]:
        return sorted(e.published / e.predicted for e in errors if e.quantity == quantity and e.counts and e.predicted)

    rate, memory = factors("throughput"), factors("memory")
    shares = sorted(e.published for e in errors if e.quantity == "scaling")
    spread = max(abs(math.log(f)) for f in memory)
    middle = math.sqrt(shares[0] * shares[-1])
    return Bands((rate[0], rate[-1]), (math.exp(-spread), math.exp(spread)), (shares[0], middle, shares[-1]))


def summary(errors: list[Error]) -> dict[str, tuple[float | int, float | int, int]]:
    """quantity → median and worst |relative error|, and how many counted."""
    result = {}
    for quantity in dict.fromkeys(e.quantity for e in errors):
        sizes = [abs(e.relative) for e in errors if e.quantity == quantity and e.counts and e.relative is not None]
        if sizes:
            result[quantity] = (statistics.median(sizes), max(sizes), len(sizes))
    return result


def section(folder: Path | None = None) -> Section:
    """The calibration part of the report."""
    errors = all_errors(folder)
    rows: list[tuple[Cell, ...]] = []
    for e in errors:
        predicted = NOT_REPORTED if e.predicted is None else derived(e.predicted, e.unit)
        error = "not comparable" if e.relative is None else derived(100 * e.relative, "%")
        rows.append((e.quantity, e.name, quoted(e.published, e.unit, e.source), predicted, error,
                     "yes" if e.counts else "no", e.remark))  # fmt: skip
    table = Table(("quantity", "anchor", "published", "predicted", "error", "counts", "remark"), tuple(rows))
    figures = {}
    for quantity, (median, worst, count) in summary(errors).items():
        figures[f"{quantity}: median error"] = derived(100 * median, "%", f"{count} anchors")
        figures[f"{quantity}: worst error"] = derived(100 * worst, "%", f"{count} anchors")
    found = bands(errors)
    figures["band on throughput, low"] = derived(found.rate[0], "×", "published/predicted, leave one system out")
    figures["band on throughput, high"] = derived(found.rate[1], "×", "published/predicted, leave one system out")
    figures["band on memory"] = derived(
        100 * (found.memory[1] - 1), "%", "worst error where the configuration is known"
    )
    notes = (
        "Throughput and wall-clock are predicted from the median efficiency of the other systems: their worst error is "
        "how much trainers differ, and shrinks only with a measurement of your own (--anchors or --calibration).",
        "Two memory rows are README requirements and two lack their settings; they are shown and do not count.",
    )
    return Section("backtest", "Backtest", figures, (table,), notes)
