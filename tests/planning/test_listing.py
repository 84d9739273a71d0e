"""The list of recipes is complete, and whole when it goes into a file."""

import pytest

from piston.cli import main
from piston.config.recipes import ORIGINS, recipe, recipe_names
from piston.planning.case import payload, resolve
from piston.planning.memory import usage
from piston.planning.request import Request


def listing(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["recipes"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_nothing_is_cut_in_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = listing(capsys)
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert set(rows) == set(recipe_names())
    for name, line in rows.items():
        run = recipe(name)
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        assert "…" not in "".join(cells[:-1])
        assert cells[3:7] == [
            run.data.repo_id, run.data.robot.name, str(run.train.batch_size), str(run.train.num_train_steps)
        ]  # fmt: skip
    assert "│ pi05_base " in rows["pi05_libero"]
    assert "│ debug " in rows["debug_restore"].removeprefix("│ debug_restore")
    for origin in ORIGINS.values():
        assert origin.differs in out


def test_memory_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    case = resolve(Request(subject="pi05_libero", gpus=1))
    one, whole = (usage(case, payload(case), samples=samples)["peak"] / 1e9 for samples in (1, 256))
    row = next(line for line in listing(capsys).splitlines() if "│ pi05_libero " in line)
    assert f"│ {one:.3g} … {whole:.3g} " in row
