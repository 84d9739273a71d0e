"""`piston plan` as a user runs it: output forms, exit codes, and no torch before it is asked for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piston.cli import main
from piston.planning.figure import MARK


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def figures(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        if {"value", "kind", "source"} <= value.keys():
            return [value]
        return [f for inner in value.values() for f in figures(inner)]
    return [f for inner in value for f in figures(inner)] if isinstance(value, list) else []


def test_json_of_seed2_prints_every_row_with_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "seed2", "--json", "-")
    found = json.loads(out)
    assert code == 0
    rows = found["seed2"]["figures"]
    assert rows["frames/s at 2048"]["value"] == pytest.approx(269.4, rel=0.002)
    assert rows["days on one node at 2048"]["value"] == pytest.approx(61.6, rel=0.002)
    everything = figures(found)
    assert len(everything) > 300
    for figure in everything:
        assert figure["kind"] in MARK
        assert (figure["value"] is None) == (figure["kind"] == "not reported")
        assert figure["source"] or figure["kind"] in ("derived", "not reported"), figure


def test_terminal_markdown_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, "plan", "pi05_libero", "--price", "2", "--json", str(tmp_path / "p.json"), "--markdown",
        str(tmp_path / "p.md"), "--html", str(tmp_path / "p.html"),
    )  # fmt: skip
    assert code == 0
    for title in (
        "Memory per GPU",
        "Throughput",
        "Corpus",
        "Scenarios",
        "Bottleneck walk",
        "Landscape",
        "Backtest",
        "Money",
    ):
        assert title in out
    assert json.loads((tmp_path / "p.json").read_text())["money"]["figures"]["cost"]["value"] > 0
    assert (tmp_path / "p.md").read_text().startswith("# Plan: pi05_libero")
    assert "<!doctype html>" in (tmp_path / "p.html").read_text()


def test_backtest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "backtest", "--json", "-")
    assert code == 0
    assert json.loads(out)["figures"]["memory: worst error"]["value"] < 15


def test_no_money_without_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "--json", "-")
    assert json.loads(out)["money"]["figures"]["cost"]["kind"] == "not reported"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--batch", "-4"), "--batch is -4"),
        (("--gpu", "H20O"), "did you mean 'H20'"),
        (("--budget", "5"), "no --price"),
        (("--html", "/nowhere/plan.html"), "cannot write /nowhere/plan.html"),
        (("--days", "0.0001", "--timesteps", "1e12"), "need at least"),
        (("--trace", "--sharding", "fsdp"), "not built yet"),
    ],
)
def test_mistakes_exit_2_with_the_reason(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, "plan", *argv)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_solving_for_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "seed2", "--days", "10", "--json", "-")
    target = json.loads(out)["target"]["figures"]
    assert target["nodes"]["value"] == 7
    assert target["days"]["value"] <= 10


STARTS = """
import resource, sys
import piston.planning
from piston.planning.plan import make_plan
from piston.planning.request import Request
make_plan(Request(subject="seed2"))
used = resource.getrusage(resource.RUSAGE_SELF)
print("torch" in sys.modules, "numpy" in sys.modules, used.ru_utime + used.ru_stime)
"""


def test_a_plan_starts_without_torch_in_under_half_a_second() -> None:
    """CPU seconds of the whole process, so that a busy machine does not decide; the best of three."""
    runs = [
        subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    parts = [done.stdout.split() for done in runs]
    assert {(torch, numpy) for torch, numpy, _ in parts} == {("False", "False")}
    assert min(float(seconds) for _, _, seconds in parts) < 0.5


def test_the_whole_command_needs_no_torch_either() -> None:
    program = "import sys\nfrom piston.cli import main\ntry:\n    main(['plan', 'seed2', '--json', '-'])\n"
    program += "except SystemExit:\n    sys.stderr.write(str('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "False"
