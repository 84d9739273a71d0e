"""`piston verify all`: every layer on every bundle, the worst errors of each in one table, one verdict."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from piston.train.loop import find_device
from piston.verify.bundle import open_bundle
from piston.verify.curve import verify_curve
from piston.verify.forward import verify_forward
from piston.verify.gradient import verify_gradient
from piston.verify.report import Report, Row, group_rows

SHIPPED = Path(__file__).resolve().parents[3] / "tests" / "golden"
LAYERS = {"forward": verify_forward, "gradient": verify_gradient, "curve": verify_curve}
NOT_BUILT = ("distributed", "checkpoint")  # layers that have no command yet; they are named, never counted as equal


@dataclass(frozen=True)
class Options:
    """Compares Piston with golden bundles in every layer; exit code 1 if anything differs or nothing was compared."""

    bundles: tuple[Path, ...] = (SHIPPED,)  # directories with MANIFEST.json; by default the one that Piston ships
    device: str = "cpu"  # where Piston computes; the bundles' numbers come from a CPU
    json: Path | None = None  # also write every row to this file; "-": to standard output, instead of the table


def all_command(args: list[str], prog: str, console: Console) -> int:
    """Runs, prints, writes; 0 if every layer that was compared is equal and at least one was in each bundle."""
    options = tyro.cli(Options, args=args, prog=prog)
    if not options.bundles:
        raise ValueError("--bundles names no directory; expected at least one with MANIFEST.json, or leave it out")
    device = str(find_device(options.device))
    reports: list[Report] = []
    for root in options.bundles:
        bundle = open_bundle(root)
        for layer, compare in LAYERS.items():
            with console.status(f"{layer}: comparing with {root}"):
                reports.append(compare(bundle, device))
    ok = equal(reports)
    if str(options.json) == "-":
        sys.stdout.write(to_json(reports) + "\n")
    else:
        render_all(reports, console)
        if options.json is not None:
            options.json.write_text(to_json(reports) + "\n")
    return 0 if ok else 1


def equal(reports: list[Report]) -> bool:
    """Whether everything compared is equal. A layer that a bundle has nothing for does not count, a bundle that no
    layer has anything for is no equality."""
    compared = {report.bundle for report in reports if report.rows}
    return {report.bundle for report in reports} == compared and all(r.ok for r in reports if r.rows)


def verdict(reports: list[Report]) -> str:
    """One line; the first difference in data-flow order where there is one."""
    different = [report for report in reports if report.rows and not report.ok]
    if different:
        return f"all: DIFFERENT; {different[0].verdict()}"
    if not equal(reports):
        return f"all: NOTHING COMPARED in {sorted({r.bundle for r in reports} - {r.bundle for r in reports if r.rows})}"
    count = sum(len(report.rows) for report in reports)
    return f"all: EQUAL, {count} arrays; layers not built and so not compared: {', '.join(NOT_BUILT)}"


def to_json(reports: list[Report]) -> str:
    """Every row of every layer, and what was left out."""
    layers = [
        {"layer": r.layer, "bundle": r.bundle, "ok": r.ok if r.rows else None, "verdict": r.verdict(),
         "rows": [{**asdict(row), "ok": row.ok} for row in r.rows], "not_compared": r.not_compared}
        for r in reports
    ]  # fmt: skip
    content = {"ok": equal(reports), "verdict": verdict(reports), "layers": layers, "not_built": list(NOT_BUILT)}
    return json.dumps(content, indent=1)


def render_all(reports: list[Report], console: Console) -> None:
    """A row a (layer, set, dtype, kind) with the array nearest to its limit, or beyond it."""
    table = Table("layer", "set", "dtype", "kind", "equal", "nearest to its limit", "error", "limit")
    for report in reports:
        for (name, dtype, kind), rows in group_rows(report.rows).items():
            worst = max(rows, key=_share)
            good = sum(row.ok for row in rows)
            style = "" if good == len(rows) else "red"
            cells = (report.layer, name, dtype, kind, f"{good} of {len(rows)}", worst.name)
            table.add_row(*map(escape, cells), f"{worst.error:.1e}", f"{worst.tolerance:.1e}", style=style)
    console.print(table)
    console.print(f"[bold {'green' if equal(reports) else 'red'}]{escape(verdict(reports))}[/]", soft_wrap=True)


def _share(row: Row) -> float:
    if row.error != row.error:
        return float("inf")
    return row.error / row.tolerance if row.tolerance else (float("inf") if row.error else 0.0)
