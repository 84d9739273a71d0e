"""A printed number: value, unit, kind (measured, derived, quoted, given, assumed), source and band."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["measured", "derived", "quoted", "given", "assumed", "not reported"]
MARK: dict[Kind, str] = {
    "measured": "m", "derived": "d", "quoted": "q", "given": "g", "assumed": "a", "not reported": "–",
}  # fmt: skip
LEGEND = "m measured · d derived · q quoted · g given by you · a assumed (change it with the option named)"


@dataclass(frozen=True)
class Figure:
    """One number and why to believe it. `low` and `high` bound it; None where no uncertainty applies (arithmetic)."""

    value: float | int | None
    unit: str = ""
    kind: Kind = "derived"
    source: str = ""
    low: float | int | None = None
    high: float | int | None = None

    def __post_init__(self) -> None:
        assert self.kind in MARK, self.kind
        assert (self.value is None) == (self.kind == "not reported"), f"{self.kind} with value {self.value}"

    @property
    def number(self) -> float | int:
        """The value; only for figures that have one."""
        assert self.value is not None, "not reported"
        return self.value

    def text(self) -> str:
        """For people: value, unit, band and mark."""
        if self.value is None:
            return "not reported"
        band = ""
        if self.low is not None and self.high is not None and not (self.low == self.high == self.value):
            band = f" ({short(self.low)}–{short(self.high)})"
        unit = f" {self.unit}" if self.unit and self.unit != "%" else self.unit
        return f"{short(self.value)}{unit}{band} [{MARK[self.kind]}]"

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value, "unit": self.unit, "kind": self.kind, "source": self.source,
            "low": self.low, "high": self.high,
        }  # fmt: skip


NOT_REPORTED = Figure(None, kind="not reported")


def derived(
    value: float | int, unit: str = "", how: str = "", low: float | int | None = None, high: float | int | None = None
) -> Figure:
    return Figure(value, unit, "derived", how, low, high)


def given(value: float | int, unit: str = "", option: str = "") -> Figure:
    return Figure(value, unit, "given", option)


def quoted(
    value: float | int, unit: str, source: str, low: float | int | None = None, high: float | int | None = None
) -> Figure:
    return Figure(value, unit, "quoted", source, low, high)


def assumed(
    value: float | int, unit: str, option: str, low: float | int | None = None, high: float | int | None = None
) -> Figure:
    return Figure(value, unit, "assumed", option, low, high)


def measured(
    value: float | int, unit: str, source: str, low: float | int | None = None, high: float | int | None = None
) -> Figure:
    return Figure(value, unit, "measured", source, low, high)


def short(value: float | int) -> str:
    """At most four significant digits, thin thousands; integers in full up to a million."""
    if isinstance(value, float | int) and not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    size = abs(value)
    if size >= 1e12:
        return f"{value:.3g}"
    for scale, letter in ((1e9, " B"), (1e6, " M")):
        if size >= scale:
            return f"{value / scale:.4g}{letter}"
    if float(value).is_integer() and size < 1e6:
        return f"{int(value):,}".replace(",", " ")
    if size >= 1000:
        return f"{round(value):,}".replace(",", " ")
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"


Cell = Figure | str


@dataclass(frozen=True)
class Table:
    """Rows of figures and words under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report: named figures, tables and remarks."""

    key: str
    title: str
    figures: dict[str, Figure] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    listed: bool = True  # False: the tables hold the same figures, so text leaves the list out

    def to_json(self) -> dict[str, Any]:
        def cell(value: Cell) -> Any:
            return value if isinstance(value, str) else value.to_json()

        return {
            "title": self.title,
            "figures": {name: figure.to_json() for name, figure in self.figures.items()},
            "tables": [
                {"title": t.title, "columns": list(t.columns), "rows": [[cell(c) for c in row] for row in t.rows]}
                for t in self.tables
            ],
            "notes": list(self.notes),
        }
