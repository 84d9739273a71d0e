"""One self-contained page: the report, and sliders that run the planner's own formulas in the browser. No network."""

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from piston.planning import landscape
from piston.planning.case import base_numbers, choices, machine
from piston.planning.figure import LEGEND, MARK, Cell, Figure, Section
from piston.planning.gpus import CATALOGUE
from piston.planning.javascript import to_javascript
from piston.planning.plan import Plan, rate_band

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def page(plan: Plan) -> str:
    """The page's whole text."""
    assets = resources.files("piston.planning") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    parts = {
        "STYLE": asset("uPlot.min.css") + asset("plan.css"),
        "LIBRARY": asset("uPlot.iife.min.js"),
        "FORMULAS": formulas_script(),
        "SCRIPT": asset("plan.js"),
        "DATA": json.dumps(data(plan), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "HEADLINE": "\n".join(f"<p>{html.escape(line)}</p>" for line in plan.headline),
        "LEGEND": html.escape(LEGEND),
        "SECTIONS": "\n".join(map(_section, plan.sections)),
        "TITLE": html.escape(f"{plan.case.name} on {plan.case.gpus} × {plan.case.gpu.name}"),
    }
    text = asset("plan.html")
    for name, value in parts.items():
        text = text.replace(f"@{name}@", value)
    return text


def formulas_script() -> str:
    """`formulas.py` as JavaScript."""
    return to_javascript((Path(__file__).parent / "formulas.py").read_text(encoding="utf-8"))


def data(plan: Plan) -> dict[str, Any]:
    """What the script computes with: costs, choices, catalogue, efficiencies with their bands."""
    case = plan.case
    chosen = choices(case, anchored=plan.anchored) | {"frames": plan.answer.frames, "nodes": plan.answer.nodes}
    chosen["batch"] = case.batch // case.nodes * plan.answer.nodes
    return {
        "costs": plan.costs,
        "base": base_numbers(case),
        "choices": chosen,
        "gpu": case.gpu.name,
        "gpus": {name: machine(gpu) for name, gpu in CATALOGUE.items()} | {case.gpu.name: machine(case.gpu)},
        "batches": list(BATCHES),
        "profiles": _profiles(plan),
        "shares": list(plan.bands.scaling),
        "landscape": [{"name": m.name, "timesteps": m.timesteps().value} for m in landscape.models()],
    }


def _profiles(plan: Plan) -> list[dict[str, Any]]:
    """Efficiency, overhead and band by origin; what the plan used comes first."""
    case = plan.case
    result = []
    for name, anchored in (("anchors", True), ("published", False)):
        efficiency = case.anchored if anchored else case.efficiency
        if efficiency is None:
            continue
        overhead = case.fit.overhead if anchored and case.fit is not None else case.overhead
        factors = rate_band(case, 1.0, plan.bands, anchored=anchored)
        result.append(
            {
                "name": name if efficiency.kind != "given" else "your efficiency",
                "hfu": efficiency.value,
                "overhead": overhead,
                "factors": list(factors),
                "kind": efficiency.kind,
                "source": efficiency.source,
            }
        )
    return result


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Figure):
        text = html.escape(cell)
        return f'<td class="missing">{text}</td>' if cell == "not reported" else f"<td>{text}</td>"
    if cell.value is None:
        return '<td class="missing">not reported</td>'
    text = cell.text().rsplit(" [", 1)[0]
    title = html.escape(f"{cell.kind}: {cell.source}", quote=True)
    return f'<td class="num" title="{title}">{html.escape(text)}<span class="mark">{MARK[cell.kind]}</span></td>'


def _section(section: Section) -> str:
    body = []
    if section.figures and section.listed:
        rows = "".join(
            f"<tr><th scope='row'>{html.escape(name)}</th>{_cell(f)}<td>{html.escape(f.source)}</td></tr>"
            for name, f in section.figures.items()
        )
        body.append(f'<div class="scroll"><table>{rows}</table></div>')
    for table in section.tables:
        head = "".join(f"<th scope='col'>{html.escape(c)}</th>" for c in table.columns)
        rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
        caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
        body.append(f'<div class="scroll"><table>{caption}<tr>{head}</tr>{rows}</table></div>')
    body += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    summary = f"<summary>{html.escape(section.title)}</summary>"
    return f'<details class="panel" id="section-{section.key}">{summary}{"".join(body)}</details>'
