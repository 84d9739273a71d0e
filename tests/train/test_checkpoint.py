"""A checkpoint is whole or it does not exist, whatever happens while it is written; damage is named."""

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piston.config.schema import RunConfig, TrainConfig
from piston.train import checkpoint
from piston.train.checkpoint import (
    BadCheckpoint,
    Experiment,
    digest,
    load_policy_weights,
    open_checkpoint,
    open_experiment,
    whole_checkpoints,
    write_checkpoint,
)


def content(step: int, size: int = 1000) -> dict[str, dict[str, Tensor]]:
    """Tensors that say which step they belong to."""
    generator = torch.Generator().manual_seed(step)
    groups = ("model", "adam_m", "adam_v", "ema")
    return {g: {"a.weight": torch.randn(size, generator=generator), "b": torch.tensor(step)} for g in groups}


FILES = {"run.json": b"{}", "state.json": b"{}", "norm_stats.json": b"{}"}


def run_in(folder: Path, **train: Any) -> RunConfig:
    return RunConfig("recipe", train=TrainConfig(checkpoint_dir=folder, exp_name="exp", **train))


def assert_whole(path: Path, step: int) -> None:
    found = open_checkpoint(path)
    assert found.step == step
    for group, tensors in content(step).items():
        assert all(torch.equal(t, tensors[name]) for name, t in found.tensors(group).items())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "7", 7, content(7), FILES)
    assert_whole(tmp_path / "7", 7)
    assert [p.name for p in tmp_path.iterdir()] == ["7"]
    manifest = json.loads((tmp_path / "7" / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in (tmp_path / "7").iterdir()} - {"manifest.json"}
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "7").iterdir()} == {0o666 & (tmp_path / "7").stat().st_mode}


def test_tensors_that_are_views_are_saved_as_themselves(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    write_checkpoint(tmp_path / "1", 1, {"model": {"t": base.T, "row": base[1]}}, FILES)
    assert torch.equal(open_checkpoint(tmp_path / "1").tensors("model")["t"], base.T)
    assert torch.equal(open_checkpoint(tmp_path / "1").tensors("model")["row"], base[1])


def test_policy_weights_are_the_average_over_the_raw_ones(tmp_path: Path) -> None:
    groups = {"model": {"w": torch.zeros(2), "frozen": torch.ones(2)}, "ema": {"w": torch.full((2,), 3.0)}}
    write_checkpoint(tmp_path / "1", 1, groups, FILES)
    assert {k: v.tolist() for k, v in load_policy_weights(tmp_path / "1").items()} == {"w": [3, 3], "frozen": [1, 1]}
    write_checkpoint(tmp_path / "2", 2, {"model": groups["model"]}, FILES)
    assert load_policy_weights(tmp_path / "2")["w"].tolist() == [0, 0]


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("damage", "message", "seen_without_hashes"),
    [
        (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json, so it was never finished", True),
        (lambda p: cut(p / "manifest.json"), "its manifest.json is damaged", True),
        (lambda p: (p / "manifest.json").write_text("[]"), "its manifest.json is damaged", True),
        (lambda p: (p / "model.safetensors").unlink(), "file model.safetensors is missing", True),
        (lambda p: cut(p / "adam_v.safetensors"), r"file adam_v.safetensors has \d+ bytes, expected \d+", True),
        (lambda p: flip(p / "ema.safetensors"), "file ema.safetensors has SHA-256", False),
        (lambda p: shutil.rmtree(p), "there is no such directory", True),
    ],
    ids=["no manifest", "half manifest", "wrong manifest", "file missing", "file cut", "bit flipped", "gone"],
)
def test_damage_is_named_and_so_is_the_checkpoint_to_use(
    tmp_path: Path, damage: Callable[[Path], Any], message: str, seen_without_hashes: bool
) -> None:
    for step in (4, 8):
        write_checkpoint(tmp_path / str(step), step, content(step), FILES)
    damage(tmp_path / "8")
    with pytest.raises(BadCheckpoint, match=message + r".*/4 is whole: move 8 away"):
        open_checkpoint(tmp_path / "8")
    with pytest.raises(BadCheckpoint, match=message):
        load_policy_weights(tmp_path / "8")
    assert [c.step for c in whole_checkpoints(tmp_path)] == ([4] if seen_without_hashes else [4, 8])
    shutil.rmtree(tmp_path / "4")
    with pytest.raises(BadCheckpoint, match="no other checkpoint of this experiment is whole"):
        open_checkpoint(tmp_path / "8")


def test_a_file_damaged_after_it_was_checked_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "1", 1, content(1), FILES)
    found = open_checkpoint(tmp_path / "1")
    (tmp_path / "1" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadCheckpoint, match=r"cannot read .*model\.safetensors"):
        found.tensors("model")
    (tmp_path / "1" / "state.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"cannot read .*state\.json"):
        _ = found.state


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "1", 1, content(1), FILES)
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    (tmp_path / "1" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(BadCheckpoint, match="format 99"):
        open_checkpoint(tmp_path / "1")


# --- kill -9 and full disks ------------------------------------------------------------------------------------------


def write_for_ever(folder: Path, first: int) -> None:
    """Saves checkpoint after checkpoint, with retention, until it is killed."""
    logging.disable(logging.CRITICAL)
    with open_experiment(run_in(folder, resume=True, keep_last=2, keep_period=7)) as experiment:
        for step in range(first, first + 10_000):
            experiment.save(step, content(step), FILES)


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path, rounds: int) -> None:
    folder = tmp_path / "recipe" / "exp"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["piston.data.loader", "piston.train.checkpoint"])
    rng, newest = random.Random(rounds), 0
    for _ in range(rounds):
        process = context.Process(target=write_for_ever, args=(tmp_path, newest + 1))
        process.start()
        before = newest
        deadline = time.monotonic() + 60
        while newest <= before + 2 and time.monotonic() < deadline:  # it is under way
            newest = max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)
        time.sleep(rng.uniform(0, 0.03))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        whole = whole_checkpoints(folder)
        assert len(whole) >= 2
        for found in whole:
            assert_whole(found.path, found.step)
        newest = whole[-1].step
        assert newest > before
    assert {c.step for c in whole_checkpoints(folder)} >= set(range(7, newest, 7))
    with open_experiment(run_in(tmp_path, resume=True)) as experiment:
        assert experiment.latest is not None
        assert experiment.latest.step == newest
        assert not list(folder.glob("*.tmp"))


class FullDisk:
    """Raises ENOSPC at the n-th of the operations that write."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int) -> None:
        self.calls, self.fail_at = 0, fail_at
        for target, name in (
            (checkpoint, "_sync"),
            (checkpoint, "save_file"),
            (Path, "write_bytes"),
            (Path, "write_text"),
            (Path, "mkdir"),
            (Path, "rename"),
        ):
            patch.setattr(target, name, self.guarded(getattr(target, name)))

    def guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call


def test_a_disk_that_fills_up_at_any_moment_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_experiment(run_in(tmp_path)) as experiment:
        folder, messages, fail_at = experiment.directory, [], 0
        experiment.save(1, content(1), FILES)
        while (fail_at := fail_at + 1) < 1000:
            with monkeypatch.context() as patch:
                disk = FullDisk(patch, fail_at)
                try:
                    experiment.save(2, content(2), FILES)
                except ValueError as error:
                    messages.append(str(error))
            if disk.calls < fail_at:  # nothing failed any more
                break
            assert_whole(folder / "1", 1)
            if (folder / "2").exists():  # renamed already
                assert_whole(folder / "2", 2)
                shutil.rmtree(folder / "2")
            assert not list(folder.glob("*.tmp"))
        assert len(messages) > 15
        assert all("No space left on device; the disk has" in m and "1 are untouched" in m for m in messages[:-1])
        assert [c.step for c in whole_checkpoints(folder)] == [2]
        assert_whole(folder / "2", 2)


# --- the experiment's directory --------------------------------------------------------------------------------------


def saved(experiment: Experiment, *steps: int) -> list[int]:
    for step in steps:
        experiment.save(step, content(step), FILES)
    return [c.step for c in whole_checkpoints(experiment.directory)]


@pytest.mark.parametrize(
    ("keep_last", "keep_period", "kept"),
    [(1, None, [60]), (2, None, [55, 60]), (1, 20, [20, 40, 60]), (2, 25, [25, 50, 55, 60])],
)
def test_retention(tmp_path: Path, keep_last: int, keep_period: int | None, kept: list[int]) -> None:
    with open_experiment(run_in(tmp_path, keep_last=keep_last, keep_period=keep_period)) as experiment:
        assert saved(experiment, *range(5, 65, 5)) == kept


def test_saving_a_step_again_keeps_the_whole_one_and_replaces_a_broken_one(tmp_path: Path) -> None:
    with open_experiment(run_in(tmp_path)) as experiment:
        path = experiment.save(3, content(3), FILES).path
        experiment.save(3, content(4), FILES)
        assert_whole(path, 3)
        (path / "manifest.json").unlink()
        experiment.save(3, content(3), FILES)
        assert_whole(path, 3)


def test_half_written_directories_are_ignored_and_cleaned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_experiment(run_in(tmp_path)) as experiment:
        saved(experiment, 5)
        folder = experiment.directory
    (folder / "run.json").write_text("{}")
    (folder / "9.tmp").mkdir()
    (folder / "metrics.jsonl.tmp").write_text("")
    (folder / "8").mkdir()
    (folder / "8" / "model.safetensors").write_text("half")
    with open_experiment(run_in(tmp_path, resume=True)) as experiment:
        assert experiment.latest is not None
        assert experiment.latest.step == 5
        assert not list(folder.glob("*.tmp"))
        assert "8: it has no manifest.json" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "bad manifest"])
def test_resuming_where_every_checkpoint_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    with open_experiment(run_in(tmp_path)) as experiment:
        path = experiment.save(5, content(5), FILES).path
    if damage == "no manifest":
        (path / "manifest.json").unlink()
    else:
        file = path / ("model.safetensors" if damage == "truncated" else "manifest.json")
        file.write_bytes(file.read_bytes()[:-7])
    refused = r"none of its checkpoints is whole \(5: .*\); restore one.*--train\.overwrite"
    with pytest.raises(BadCheckpoint, match=refused), open_experiment(run_in(tmp_path, resume=True)):
        pass
    path.rename(tmp_path / "moved away")
    with open_experiment(run_in(tmp_path, resume=True)) as experiment:
        assert experiment.latest is None


def test_a_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "recipe").write_text("a file")
    cannot = r"cannot write in the run's directory .*recipe/exp \(.*--train\.checkpoint-dir"
    with pytest.raises(ValueError, match=cannot), open_experiment(run_in(tmp_path)):
        pass


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with (
        open_experiment(run_in(tmp_path)),
        pytest.raises(ValueError, match="another process is training"),
        open_experiment(run_in(tmp_path, resume=True)),
    ):
        pass
    with open_experiment(run_in(tmp_path, resume=True)) as experiment:
        assert experiment.latest is None


def test_overwrite_deletes_runs_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "recipe" / "exp"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds a run already"), open_experiment(run_in(tmp_path)):
        pass
    with pytest.raises(ValueError, match="is no run of Piston"), open_experiment(run_in(tmp_path, overwrite=True)):
        pass
    assert (folder / "thesis.tex").exists()
    (folder / "run.json").write_text("{}")
    (folder / "12").mkdir()
    with open_experiment(run_in(tmp_path, overwrite=True)):
        assert {p.name for p in folder.iterdir()} == {".lock"}


def test_every_field_of_the_configuration_is_either_free_or_refused() -> None:
    # A new field in TrainConfig or DataConfig is refused on resumption until someone decides that it is free.
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    named = {f.removeprefix("train.") for f in checkpoint.FREE_FIELDS | checkpoint.ROUNDING_FIELDS if "train." in f}
    assert named < known
    assert known - named == {"batch_size", "seed", "init_except"}


def test_digest_depends_on_every_part() -> None:
    values = torch.arange(6).view(2, 3).numpy()
    assert digest(values, b"x") == digest(values.copy(), b"x")
    assert digest(values.T) == digest(values.T.copy())
    assert len({digest(values, b"x"), digest(values, b"y"), digest(values + 1, b"x"), digest(values)}) == 4
