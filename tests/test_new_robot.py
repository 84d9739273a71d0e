"""docs/new-robot.md is followed to the letter, on a small data set and with the model made small by options."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from piston.cli import main
from piston.config.recipes import recipe

sys.path.insert(0, str(Path(__file__).parent / "data"))
from make_sets import make_set  # pyright: ignore[reportMissingImports]

PAGE = (Path(__file__).parents[1] / "docs" / "new-robot.md").read_text()
SMALL = (
    "--model.paligemma.width 16 --model.paligemma.depth 2 --model.paligemma.mlp-dim 32 --model.paligemma.num-heads 2 "
    "--model.paligemma.head-dim 8 --model.action-expert.width 16 --model.action-expert.depth 2 "
    "--model.action-expert.mlp-dim 32 --model.action-expert.num-heads 2 --model.action-expert.head-dim 8 "
    "--model.siglip.width 16 --model.siglip.depth 1 --model.siglip.mlp-dim 32 --model.siglip.num-heads 2 "
    "--model.vocab-size 1024 --model.image-size 28 28 --model.action-horizon 4 --model.dtype float32 "
    "--data.tokenizer shipped --data.num-workers 0 --train.batch-size 4 --train.num-train-steps 2 --train.device cpu"
)


def run(*args: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    assert caught.value.code == 0


def test_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    robot, drive = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("my_arm.py").write_text(robot)
    Path("drive.py").write_text(drive)
    make_set(Path("arm"))
    assert recipe("my_arm.py").data.robot.name == "my_arm"
    run("data", "stats", "arm", "--recipe", "my_arm.py")
    assert Path("assets/my_arm/me/arm/norm_stats.json").is_file()
    run("plan", "my_arm.py", "--gpus", "1")
    run("train", "my_arm.py", "--data.root", "arm", "--train.exp-name", "first", *SMALL.split())
    checkpoint = Path("checkpoints/my_arm/first/2")
    run("eval", str(checkpoint), "--open-loop", "arm", "--device", "cpu")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["drive.py", str(checkpoint)])
    runpy.run_path("drive.py")
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 * 2  # two chunks, half of four actions each
    assert all(len(line.strip("[]").split()) == 4 for line in lines)


def test_every_command_of_the_page_exists() -> None:
    commands = re.findall(r"^piston (data \w+|\w+)", PAGE, re.MULTILINE)
    from piston.cli import COMMANDS

    assert set(commands) == {"data info", "data check", "data stats", "plan", "train", "eval"}
    assert set(commands) <= set(COMMANDS)
