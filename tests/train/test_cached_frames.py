"""Training takes frames from a data set's cache by itself, says so, and never mixes lossy frames with the originals."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from conftest import MakeRun  # pyright: ignore[reportMissingImports]
from piston.config.schema import NO_CACHE, RunConfig
from piston.data.cache_build import Order, Part, cache_command
from piston.train.loop import train
from piston.train.sources import open_sources


@pytest.fixture
def root(data_set: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(data_set[0], tmp_path / "set")


def cache(root: Path, coding: str) -> None:
    order = Order(root, None, (28, 28), None, coding, Part(), 1, "fail", 1e-4)
    assert cache_command(order, "build", Console(quiet=True)) == 0


def losses(run: RunConfig) -> tuple[list[str], str]:
    """The loss of every step, and what was said."""
    console = Console(record=True, width=300)
    result = train(run, console)
    lines = (result.checkpoint.parent / "metrics.jsonl").read_text().splitlines()
    return [line.partition('"loss": ')[2].partition(",")[0] for line in lines], console.export_text()


def test_lossless_frames_change_no_loss(make_run: MakeRun, root: Path) -> None:
    original, said = losses(make_run(data_root=root, exp_name="original"))
    assert "cached frames" not in said
    cache(root, "lossless")
    cached, said = losses(make_run(data_root=root, exp_name="cached"))
    assert "cached frames, lossless at 28×28, exact" in said
    assert len(original) >= 10
    assert cached == original
    going_on, _ = losses(make_run(data_root=root, exp_name="original", resume=True, num_train_steps=12))
    assert len(going_on) > len(original)


def test_lossy_frames_are_another_run(make_run: MakeRun, root: Path) -> None:
    original, _ = losses(make_run(data_root=root, exp_name="original", num_train_steps=4))
    cache(root, "q80-420")
    cached, said = losses(make_run(data_root=root, exp_name="cached", num_train_steps=4))
    assert "cached frames, q80-420 at 28×28, PSNR" in said
    assert cached != original
    again = {"data_root": root, "resume": True, "num_train_steps": 6}
    with pytest.raises(ValueError, match=r"content of the cached frames \(data\.cache\): None → [0-9a-f]{32}"):
        train(make_run(exp_name="original", **again), Console(quiet=True))
    with pytest.raises(ValueError, match=r"content of the cached frames \(data\.cache\): [0-9a-f]{32} → None"):
        train(make_run(exp_name="cached", cache=NO_CACHE, **again), Console(quiet=True))
    assert train(make_run(exp_name="original", cache=NO_CACHE, **again), Console(quiet=True)).step == 6
    assert train(make_run(exp_name="cached", **again), Console(quiet=True)).step == 6


def test_a_named_cache_that_is_not_there_stops_the_run(make_run: MakeRun, root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no frame cache.*piston data cache"):
        open_sources(make_run(data_root=root, cache=tmp_path / "none"), None)
