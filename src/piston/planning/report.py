"""The plan as text: rich tables in a terminal, Markdown, JSON. One rendering for every section."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from piston.planning.figure import LEGEND, Cell, Section
from piston.planning.plan import Plan


def cell_text(cell: Cell) -> str:
    """A cell for people."""
    return cell if isinstance(cell, str) else cell.text()


def render(plan: Plan, console: Console) -> None:
    """Every section, in a terminal."""
    for line in plan.headline:
        console.print(f"[bold]{escape(line)}[/]")
    for section in plan.sections:
        render_section(section, console)
    console.print(f"\n[dim]{escape(LEGEND)}[/]")


def render_section(section: Section, console: Console) -> None:
    """Figures, tables and remarks of one section."""
    console.print(f"\n[bold underline]{escape(section.title)}[/]")
    if section.figures and section.listed:
        table = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, figure in section.figures.items():
            table.add_row(escape(name), escape(figure.text()), f"[dim]{escape(figure.source)}[/]")
        console.print(table)
    for content in section.tables:
        table = RichTable(*map(escape, content.columns), title=escape(content.title) or None, title_justify="left")
        for row in content.rows:
            table.add_row(*(escape(cell_text(c)) for c in row))
        console.print(table)
    for note in section.notes:
        console.print(f"• {escape(note)}")


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def markdown(plan: Plan) -> str:
    """The same as Markdown."""
    lines = [f"# Plan: {plan.case.name}", "", *(f"- {line}" for line in plan.headline), ""]
    for section in plan.sections:
        lines += [f"## {section.title}", ""]
        if section.figures and section.listed:
            lines += [_markdown_row(["quantity", "value", "source"]), _markdown_row(["---"] * 3)]
            lines += [_markdown_row([name, f.text(), f.source]) for name, f in section.figures.items()] + [""]
        for table in section.tables:
            lines += [f"**{table.title}**", ""] if table.title else []
            lines += [_markdown_row(list(table.columns)), _markdown_row(["---"] * len(table.columns))]
            lines += [_markdown_row([cell_text(c) for c in row]) for row in table.rows] + [""]
        lines += [f"- {note}" for note in section.notes] + [""]
    return "\n".join([*lines, LEGEND, ""])


def to_json(plan: Plan) -> str:
    """The same for programs."""
    return json.dumps(plan.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
