"""The command line: names are fixed, mistakes name the nearest right thing, exit codes mean what they say."""

import json
from pathlib import Path

import pytest

from piston.cli import COMMANDS, find_command, main


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_command_names_are_fixed() -> None:
    """Tools and users rely on these; adding one is a decision, renaming one is a break."""
    assert {
        "train", "recipes", "verify forward", "verify gradient", "verify curve", "data info", "data check",
        "data stats", "data demo", "eval",
    } <= set(COMMANDS)  # fmt: skip


def test_two_words_and_one_word() -> None:
    assert find_command(["verify", "forward", "--bundle", "x"]) == ("verify forward", ["--bundle", "x"])
    assert find_command(["train", "demo"]) == ("train", ["demo"])


@pytest.mark.parametrize(
    ("argv", "hint"),
    [(["trian"], "did you mean `piston train`"), (["verify", "foward"], "did you mean `piston verify forward`")],
)
def test_an_unknown_command_names_the_nearest(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert hint in capsys.readouterr().err


def test_an_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "pi05_libro") == 2
    assert "did you mean 'pi05_libero'" in capsys.readouterr().err


def test_an_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "pi05_libero", "--optim.peek-lr", "1e-4") == 2
    assert "--optim.peak-lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--train.batch-size", "30", "--train.accumulate", "4"], "not a multiple of train.accumulate 4"),
        (["--optim.decay-steps", "5"], "does not exceed warmup_steps"),
        (["--train.resume", "--train.overwrite"], "both on"),
        (["--model.action-dim", "4"], "never cut"),
    ],
)
def test_impossible_combinations_stop_before_anything_starts(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "pi0_libero", *options) == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(name.split()[-1] in out for name in COMMANDS)
    assert run("train", "--help") == 0
    assert "pi05_libero" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("piston ")


def test_verify_exit_codes(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "forward", "--bundle", str(tmp_path)) == 2
    assert "no MANIFEST.json" in capsys.readouterr().err
    manifest = json.loads((golden / "MANIFEST.json").read_text())
    files = ["tiny_pi0_inputs.npz", "tiny_pi0_float32.npz"]
    manifest["sets"] = {"tiny_pi0": {**manifest["sets"]["tiny_pi0"], "files": files}}
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    for name in ("inputs", "float32"):
        (tmp_path / f"tiny_pi0_{name}.npz").write_bytes((golden / f"tiny_pi0_{name}.npz").read_bytes())
    report = tmp_path / "report.json"
    assert run("verify", "forward", "--bundle", str(tmp_path), "--json", str(report)) == 0
    assert json.loads(report.read_text())["ok"] is True
    assert run("verify", "curve", "--bundle", str(tmp_path)) == 1  # nothing to compare proves nothing


def test_a_path_that_cannot_be_written_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "demo", "/proc/nowhere/set", "--episodes", "1") == 2
    assert "/proc/nowhere" in capsys.readouterr().err


def test_from_needs_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("train", "--from", str(tmp_path / "none.json")) == 2
    assert "cannot read" in capsys.readouterr().err
