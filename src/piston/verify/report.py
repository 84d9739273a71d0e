"""What a comparison found: one row per array, a table for people, JSON for programs, one verdict line."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIECE = 1 << 22
Kind = Literal["tap", "gradient", "sampling", "curve", "unit", "preprocess"]


@dataclass(frozen=True)
class Row:
    """One array compared. `error` and `tolerance` are in the unit that `measure` names."""

    set: str
    dtype: str
    kind: Kind
    name: str
    error: float
    tolerance: float
    measure: str = "max abs / max |reference|"
    note: str = ""
    l2: float | None = None  # relative L2 distance
    cosine: float | None = None
    norm_ratio: float | None = None

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.tolerance)  # False for NaN


@dataclass
class Report:
    """Everything one layer compared, in data-flow order."""

    layer: str
    bundle: str
    rows: list[Row] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def first_failure(self) -> Row | None:
        return next((row for row in self.rows if not row.ok), None)

    def to_json(self) -> str:
        rows = [{**asdict(row), "ok": row.ok} for row in self.rows]
        content = {
            "layer": self.layer,
            "bundle": self.bundle,
            "ok": self.ok,
            "verdict": self.verdict(),
            "rows": rows,
            "not_compared": self.not_compared,
        }
        return json.dumps(content, indent=1, allow_nan=True)

    def verdict(self) -> str:
        """One line: equal, or what differs first."""
        if not self.rows:
            return f"{self.layer}: NOTHING COMPARED in {self.bundle}: no set has what this layer needs"
        failed = self.first_failure()
        if failed is None:
            worst = max(self.rows, key=lambda row: row.error / row.tolerance if row.tolerance else 0.0)
            return (
                f"{self.layer}: EQUAL, {len(self.rows)} arrays; nearest to its limit: {worst.set} {worst.dtype} "
                f"{worst.name} {worst.error:.1e} of {worst.tolerance:.1e}"
            )
        count = sum(not row.ok for row in self.rows)
        return (
            f"{self.layer}: DIFFERENT, {count} of {len(self.rows)} arrays; first in data-flow order: {failed.set} "
            f"{failed.dtype} {failed.name}, {failed.measure} {failed.error:.2e}, tolerance {failed.tolerance:.1e}"
        )


def group_rows(rows: list[Row]) -> dict[tuple[str, str, Kind], list[Row]]:
    """Rows by (set, dtype, kind), in the order of appearance."""
    groups: dict[tuple[str, str, Kind], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.set, row.dtype, row.kind), []).append(row)
    return groups


def render(report: Report, console: Console, *, worst: int = 5) -> None:
    """A table a (set, dtype, kind): every failing row and the `worst` others by share of their tolerance."""
    for (name, dtype, kind), rows in group_rows(report.rows).items():
        failing = [row for row in rows if not row.ok]
        passing = sorted((r for r in rows if r.ok), key=lambda r: r.error / r.tolerance if r.tolerance else 0.0)
        table = Table(
            title=f"{name} · {dtype} · {kind}: {len(rows) - len(failing)} of {len(rows)} equal", title_justify="left"
        )
        for column in ("array", "error", "tolerance", "measure", "note"):
            table.add_column(column, overflow="fold")
        for row in [*failing, *reversed(passing[-worst:])]:
            detail = row.note
            if row.cosine is not None:
                detail = f"L2 {row.l2:.1e}, cosine {row.cosine:.6f}, norm ratio {row.norm_ratio:.6f} {row.note}".strip()
            mark = "" if row.ok else "[red]✗ [/red]"
            table.add_row(f"{mark}{escape(row.name)}", f"{row.error:.2e}", f"{row.tolerance:.1e}", row.measure, detail)
        console.print(table)
    if report.not_compared:
        console.print(f"Not compared (no counterpart here): {', '.join(report.not_compared)}")
    console.print(f"[bold {'green' if report.ok else 'red'}]{escape(report.verdict())}[/]")


def _pieces(ours: np.ndarray, reference: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both flat and float64, a few million entries at a time: real weights would take GBs. At least one piece."""
    a, b = ours.reshape(-1), reference.reshape(-1)
    for start in range(0, max(a.size, 1), PIECE):
        yield a[start : start + PIECE].astype(np.float64), b[start : start + PIECE].astype(np.float64)


def relative_max(ours: np.ndarray, reference: np.ndarray) -> float:
    """max |ours − reference| / max |reference| (or the absolute error where the reference is all zero)."""
    if ours.shape != reference.shape:
        return float("inf")
    if reference.size == 0:
        return 0.0
    error = float(np.max([np.abs(a - b).max() for a, b in _pieces(ours, reference)]))  # Python's max may lose a NaN
    scale = float(np.max([np.abs(b).max() for _, b in _pieces(ours, reference)]))
    return error / scale if scale > 0 else error


def relative_l2(ours: np.ndarray, reference: np.ndarray) -> float:
    """‖ours − reference‖ / ‖reference‖."""
    if ours.shape != reference.shape:
        return float("inf")
    error = math.sqrt(sum(float((a - b) @ (a - b)) for a, b in _pieces(ours, reference)))
    scale = math.sqrt(sum(float(b @ b) for _, b in _pieces(ours, reference)))
    return error / scale if scale > 0 else error


def directions(ours: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Cosine and norm ratio; (1, 1) where both are zero."""
    products = [(float(a @ b), float(a @ a), float(b @ b)) for a, b in _pieces(ours, reference)]
    ab, na, nb = (sum(column) for column in zip(*products, strict=True))
    na, nb = math.sqrt(na), math.sqrt(nb)
    if na == 0.0 and nb == 0.0:
        return 1.0, 1.0
    if na == 0.0 or nb == 0.0:
        return 0.0, float("inf") if nb == 0.0 else 0.0
    return ab / (na * nb), na / nb
