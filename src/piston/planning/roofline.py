"""The least a step can take: each part at the datasheet's matrix peak or memory bandwidth, the slower one."""

from dataclasses import dataclass

from piston.model.cost import flops_by_module, parameters
from piston.planning import formulas
from piston.planning.activations import Unit, compute_bytes, units
from piston.planning.case import Case, settings
from piston.planning.figure import Cell, Table, derived

PARTS = {
    "vision tower": ("siglip", "projector"),
    "joint transformer": ("gemma", "expert", "adarms"),
    "embedding and heads": ("embedding", "heads"),
}
UNITS = {
    "vision tower": ("vision blocks",),
    "joint transformer": ("joint blocks", "last joint block"),
    "embedding and heads": ("token embedding", "everything else"),
}


@dataclass(frozen=True)
class Bound:
    """Seconds of one part of one GPU's step at the two ceilings."""

    name: str
    compute: float | int
    memory: float | int

    @property
    def seconds(self) -> float | int:
        return max(self.compute, self.memory)

    @property
    def by(self) -> str:
        return "matrix peak" if self.compute >= self.memory else "memory bandwidth"


def bounds(case: Case) -> list[Bound]:
    """Every part of the step; forward and backward without recomputation, then the optimizer's update.

    Memory: weights read three times in the compute dtype and cast once, what forward keeps written and read once.
    """
    merged = settings(case, anchored=False)
    counts, work = parameters(case.model), flops_by_module(case.model, case.dead)
    bandwidth, width = case.gpu.bandwidth * 1e9, compute_bytes(case.model)
    by_name: dict[str, Unit] = {u.name: u for u in units(case.model)}
    result = []
    for name, modules in PARTS.items():
        weights = sum(counts[m] for m in modules if m != "embedding")
        kept = sum(by_name[n].count * by_name[n].saved(case.request.kernels) for n in UNITS[name]) * case.per_gpu
        moved = weights * (3 * width + (4 + width if width < 4 else 0)) + 2 * kept
        products = sum(work[m].model for m in modules) * case.per_gpu
        result.append(Bound(name, products / merged["peak"], moved / bandwidth))
    return [*result, Bound("optimizer update", 0.0, formulas.update_bytes(merged) / bandwidth)]


def table(case: Case) -> Table:
    """The bounds as a table, with their sum."""
    found = bounds(case)
    rows: list[tuple[Cell, ...]] = [
        (b.name, derived(b.compute, "s", "FLOPs / datasheet peak"), derived(b.memory, "s", "bytes / bandwidth"), b.by)
        for b in found
    ]
    total = sum(b.seconds for b in found)
    rows.append(("least step", derived(total, "s", "sum of the slower ones"), "", "no step is faster"))
    return Table(
        ("part", "at matrix peak", "at memory bandwidth", "bound by"), tuple(rows), "Roofline, one GPU, one step"
    )
