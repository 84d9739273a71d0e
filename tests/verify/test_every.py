"""`piston verify all`: one table, one verdict, honest about what it did not compare."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from piston.cli import main
from piston.verify.every import LAYERS, NOT_BUILT, equal, render_all, verdict
from piston.verify.report import Report, Row


def _report(layer: str, bundle: str, *errors: float) -> Report:
    rows = [Row("set", "float32", "tap", f"array_{i}", error, 1e-5) for i, error in enumerate(errors)]
    return Report(layer, bundle, rows)


def test_every_layer_of_the_shipped_bundle_is_equal(golden: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", "all", "--bundles", str(golden), "--json", str(out)])
    assert exit_info.value.code == 0
    found = json.loads(out.read_text())
    assert found["ok"] is True
    assert [layer["layer"] for layer in found["layers"]] == list(LAYERS)
    assert all(layer["ok"] and layer["rows"] for layer in found["layers"])
    assert found["not_built"] == list(NOT_BUILT)


def test_one_difference_makes_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [_report("forward", "a", 1e-6, 2e-5), _report("gradient", "a", 1e-7)]
    assert not equal(reports)
    assert "array_1" in verdict(reports)
    assert verdict(reports).startswith("all: DIFFERENT; forward")
    render_all(reports, Console(width=200))
    assert "1 of 2" in capsys.readouterr().out


def test_nan_is_a_difference() -> None:
    assert not equal([_report("forward", "a", float("nan"))])


def test_a_layer_without_arrays_does_not_count_but_an_empty_bundle_is_no_equality() -> None:
    assert equal([_report("forward", "a", 1e-6), _report("curve", "a")])
    empty = [_report("forward", "a", 1e-6), _report("forward", "b"), _report("curve", "b")]
    assert not equal(empty)
    assert verdict(empty) == "all: NOTHING COMPARED in ['b']"


def test_no_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", "all", "--bundles", str(tmp_path / "none")])
    assert exit_info.value.code == 2
