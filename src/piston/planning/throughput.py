"""Step time two ways: fitted to measured anchors, and from FLOPs, datasheet peak and the efficiency others reached."""

import json
import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from piston.config.recipes import PI0, PI05
from piston.config.schema import require
from piston.model.cost import flops, recompute
from piston.planning.coefficients import reshaped
from piston.planning.gpus import find_gpu
from piston.planning.published import RATES, Rate

SCHEMA = "piston.anchors/1"
POINT_FIELDS = {"batch", "wall_s", "compute_s", "data_s", "memory_gb", "source"}
FILE_FIELDS = {"schema", "gpu", "gpus", "cameras", "text", "horizon", "points"}


@dataclass(frozen=True)
class Anchor:
    """One measured step of one node: global batch, seconds of wall clock, and of compute where known."""

    batch: int
    wall_s: float | int
    compute_s: float | int | None = None
    data_s: float | int | None = None
    memory_gb: float | int | None = None
    source: str = ""


@dataclass(frozen=True)
class Anchors:
    """Measured steps of one machine and one shape of sample."""

    points: tuple[Anchor, ...]
    gpu: str
    gpus: int
    cameras: int
    text: int
    horizon: int
    source: str


@dataclass(frozen=True)
class Fit:
    """wall(B) = slope·B + overhead (+ curve·B²), seconds, for one node's batch B; ± at 95 %, None from one point."""

    slope: float | int
    overhead: float | int
    points: int
    method: str
    curve: float | int = 0.0
    slope_error: float | int | None = None
    overhead_error: float | int | None = None
    residual_error: float | int | None = None
    covariance: tuple[tuple[float | int, ...], ...] = ()
    quantile: float | int = 0.0

    def wall(self, batch: float | int) -> float | int:
        """Seconds of one step."""
        return self.slope * batch + self.overhead + self.curve * batch * batch

    def rate(self, batch: float | int) -> float | int:
        """Samples per second of one node."""
        return batch / self.wall(batch)

    def wall_error(self, batch: float | int) -> float | int | None:
        """Half-width of the 95 % interval of the mean step time at this batch; None from too few points."""
        if not self.covariance:
            return None
        row = [batch, 1.0, batch * batch][: len(self.covariance)]
        variance = sum(row[i] * row[j] * c for i, line in enumerate(self.covariance) for j, c in enumerate(line))
        return self.quantile * math.sqrt(max(variance, 0.0))


def read_anchors(path: Path) -> Anchors:
    """The anchors of a JSON file; every mistake in it raises ValueError with file and field."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read anchors {path}: {error.strerror}; give --anchors a JSON file") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"anchors {path} are not JSON: {error.msg} at line {error.lineno}; expected an object with schema "
            f"{SCHEMA!r} and points: see docs/plan.md"
        ) from error
    where = f"anchors {path}"
    require(isinstance(content, dict), f"{where} hold a {type(content).__name__}, expected an object: see docs/plan.md")
    require(
        content.get("schema") == SCHEMA,
        f"{where} have schema {content.get('schema')!r}, expected {SCHEMA!r}; add it once the fields match "
        "docs/plan.md",
    )
    unknown = sorted(set(content) - FILE_FIELDS)
    require(not unknown, f"{where} have unknown fields {unknown}; known are {sorted(FILE_FIELDS)}: correct the names")
    rows = content.get("points")
    require(isinstance(rows, list) and bool(rows), f"{where}: `points` is {rows!r}, expected a list of measured steps")
    assert isinstance(rows, list)
    points = tuple(_point(row, f"{where}, points[{i}]") for i, row in enumerate(rows))
    shape = {name: _number(content, name, where, whole=True) for name in ("gpus", "cameras", "text", "horizon")}
    gpu = content.get("gpu")
    require(isinstance(gpu, str), f'{where}: `gpu` is {gpu!r}, expected a name of the GPU catalogue, e.g. "H200"')
    find_gpu(str(gpu))
    anchors = Anchors(points, str(gpu), source=path.name, **{k: int(v) for k, v in shape.items()})
    check_points(anchors.points, where)
    return anchors


def _point(row: Any, where: str) -> Anchor:
    require(isinstance(row, dict), f"{where} is {row!r}, expected an object with batch and wall_s")
    unknown = sorted(set(row) - POINT_FIELDS)
    require(not unknown, f"{where} has unknown fields {unknown}; known are {sorted(POINT_FIELDS)}: correct the names")
    optional = {n: _number(row, n, where) for n in ("compute_s", "data_s", "memory_gb") if row.get(n) is not None}
    batch = int(_number(row, "batch", where, whole=True))
    return Anchor(batch, _number(row, "wall_s", where), source=str(row.get("source", "")), **optional)


def _number(row: dict[str, Any], name: str, where: str, *, whole: bool = False) -> float | int:
    value = row.get(name)
    kind = "a whole positive number" if whole else "a positive finite number"
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    good = good and math.isfinite(value) and value > 0  # pyright: ignore[reportArgumentType, reportOptionalOperand]
    require(good, f"{where}: `{name}` is {value!r}, expected {kind}; measure it again or remove the point")
    assert isinstance(value, int | float)
    return float(value)


def check_points(points: tuple[Anchor, ...], where: str) -> None:
    """Raises ValueError for points that cannot be fitted: one twice, compute longer than the step."""
    seen: dict[tuple[int, float | int], int] = {}
    for i, point in enumerate(points):
        key = (point.batch, point.wall_s)
        require(
            key not in seen,
            f"{where}: points[{i}] repeats points[{seen.get(key)}] (batch {point.batch}, {point.wall_s} s); one "
            "measurement counted twice would narrow the interval: remove one",
        )
        seen[key] = i
        require(
            point.compute_s is None or point.compute_s <= point.wall_s,
            f"{where}: points[{i}] has compute_s {point.compute_s} above wall_s {point.wall_s}; the step contains its "
            "compute: correct one of them",
        )


def fit(points: tuple[Anchor, ...], where: str = "anchors") -> Fit:
    """The two-term model through the points: exact for one (needs compute_s) or two, least squares from three on.

    From six points on at four batches a quadratic term joins if its 95 % interval excludes zero.
    """
    check_points(points, where)
    batches = sorted({p.batch for p in points})
    if len(points) == 1 or len(batches) == 1:
        with_compute = [p for p in points if p.compute_s is not None]
        require(
            bool(with_compute),
            f"{where} hold one batch size ({batches[0]}) without compute_s; a slope and an overhead cannot be told "
            "apart "
            "from one step time: add compute_s, or a second batch",
        )
        slope = statistics.fmean(p.compute_s / p.batch for p in with_compute if p.compute_s is not None)
        overhead = statistics.fmean(p.wall_s - (p.compute_s or 0.0) for p in with_compute)
        return Fit(slope, overhead, len(points), "one anchor: compute/batch, and the rest of the step")
    result = _least_squares(points, 2)
    if len(points) >= 6 and len(batches) >= 4:
        curved = _least_squares(points, 3)
        if curved.residual_error is not None and abs(curved.curve) > curved.residual_error:
            result = curved
    require(
        result.slope > 0 and result.wall(min(batches)) > 0,
        f"{where} give {result.slope:.3g} s per sample; a step cannot get faster with more samples: "
        "check that all points are of one machine and one shape",
    )
    return result


def _least_squares(points: tuple[Anchor, ...], terms: int) -> Fit:
    import numpy as np

    b = np.array([p.batch for p in points], dtype=float)
    wall = np.array([p.wall_s for p in points], dtype=float)
    columns = np.stack([b, np.ones_like(b), b * b][:terms], axis=1)
    scale = np.abs(columns).max(axis=0)
    solution = np.linalg.lstsq(columns / scale, wall, rcond=None)[0] / scale
    curve = float(solution[2]) if terms == 3 else 0.0
    freedom = len(points) - terms
    if freedom < 1:
        return Fit(float(solution[0]), float(solution[1]), len(points), "exact through two batches", curve)
    residual = wall - columns @ solution
    inverse = np.linalg.inv((columns / scale).T @ (columns / scale)) / np.outer(scale, scale)
    covariance = inverse * float(residual @ residual) / freedom
    quantile = student_t(freedom)
    errors = quantile * np.sqrt(np.clip(np.diag(covariance), 0.0, None))
    return Fit(
        float(solution[0]), float(solution[1]), len(points), f"least squares, {len(points)} points, {terms} terms",
        curve,
        float(errors[0]), float(errors[1]), float(errors[2]) if terms == 3 else None,
        tuple(tuple(float(v) for v in line) for line in covariance), quantile,
    )  # fmt: skip


@lru_cache(maxsize=64)
def student_t(freedom: int) -> float | int:
    """The 97.5 % point of Student's t: where half of a 95 % interval ends."""

    def density(x: float | int) -> float | int:
        return (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(x: float | int, pieces: int = 400) -> float | int:
        width = x / pieces
        inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, pieces))
        return 0.5 + constant * width / 3 * (density(0) + inner + density(x))

    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.975 else (low, middle)
    return (low + high) / 2


def executed_per_sample(rate: Rate) -> float | int | None:
    """FLOPs that the published system executed per sample, full recomputation included; None: shape not reported."""
    if rate.cameras is None or rate.text is None or rate.horizon is None:
        return None
    config = reshaped(PI05 if rate.pi05 else PI0, rate.cameras, rate.text, rate.horizon)
    return flops(config, rate.dead).model + recompute(config, rate.dead, prefix_last=rate.dead == "scanned")


def reached(rate: Rate) -> float | int | None:
    """Share of the datasheet peak that the system's executed FLOPs reached (HFU); None if GPU or shape is unknown."""
    executed = executed_per_sample(rate)
    if executed is None or rate.gpu is None:
        return None
    return rate.per_gpu * executed / (find_gpu(rate.gpu).bfloat16 * 1e12)


@dataclass(frozen=True)
class Efficiency:
    """HFU to plan with, its range, and where it comes from."""

    value: float | int
    low: float | int
    high: float | int
    kind: str
    source: str


def published_efficiency(without: str | None = None) -> Efficiency:
    """Median and range of what published systems with known GPU and shape reached; `without` leaves one system out."""
    known = {r.name: reached(r) for r in RATES if r.system != without}
    values = sorted(v for v in known.values() if v is not None)
    names = ", ".join(name for name, v in known.items() if v is not None)
    return Efficiency(
        statistics.median(values),
        values[0],
        values[-1],
        "quoted",
        f"median and range of {len(values)} published: {names}",
    )
