"""`piston plan` and `piston plan backtest`: argv → request → report in the terminal, JSON, Markdown or a page."""

import dataclasses
import sys
from pathlib import Path

import tyro
from rich.console import Console

from piston.planning.request import Request


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the report goes besides the terminal.

    Args:
        json: file for JSON; "-" prints it instead of the tables.
        markdown: file for Markdown.
        html: file for one self-contained page with sliders.
    """

    json: Path | None = None
    markdown: Path | None = None
    html: Path | None = None


def plan_command(args: list[str], prog: str, console: Console) -> int:
    """Plans `SUBJECT [options]`; the subject is a recipe or `seed2`, by default pi05_libero."""
    named = bool(args) and not args[0].startswith("-")
    subject, rest = (args[0], args[1:]) if named else (Request.subject, args)

    def options(
        request: tyro.conf.OmitArgPrefixes[Request], output: tyro.conf.OmitArgPrefixes[Output]
    ) -> tuple[Request, Output]:
        """Predicts time, memory, data, cost and bottleneck of a run before it starts: `piston plan pi05_libero`."""
        return request, output

    request, output = tyro.cli(
        options, args=[*rest, "--subject", subject] if named else rest, prog=f"{prog} [RECIPE|seed2]"
    )
    from piston.planning import report
    from piston.planning.plan import make_plan

    plan = make_plan(request)
    to_stdout = str(output.json) == "-"
    if to_stdout:
        sys.stdout.write(report.to_json(plan) + "\n")
    else:
        report.render(plan, console)
    if output.json is not None and not to_stdout:
        _write(output.json, report.to_json(plan) + "\n", "--json")
    if output.markdown is not None:
        _write(output.markdown, report.markdown(plan), "--markdown")
    if output.html is not None:
        from piston.planning.page import page

        _write(output.html, page(plan), "--html")
        if not to_stdout:
            console.print(f"wrote {output.html} ({output.html.stat().st_size / 1e6:.2f} MB)")
    return 0


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror}; {option} needs a file in a folder that exists and is writable"
        ) from error


def backtest_command(args: list[str], prog: str, console: Console) -> int:
    """Compares the planner with everything published, and with every profile in a folder."""

    def options(profiles: Path | None = None, json: Path | None = None) -> tuple[Path | None, Path | None]:
        """Error per quantity against published anchors; the bands that the planner prints come from here.

        Args:
            profiles: a folder with JSON files of `piston profile --json`.
            json: file for JSON; "-" prints it instead of the tables.
        """
        return profiles, json

    profiles, target = tyro.cli(options, args=args, prog=prog)
    import json as json_module

    from piston.planning import backtest, report

    section = backtest.section(profiles)
    text = json_module.dumps(section.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    if str(target) == "-":
        sys.stdout.write(text + "\n")
        return 0
    report.render_section(section, console)
    if target is not None:
        _write(target, text + "\n", "--json")
    return 0
