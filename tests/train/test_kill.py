"""`piston train` as a process, killed with kill -9 again and again: its curve is that of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piston.config.schema import RunConfig
from piston.config.serialize import to_json
from piston.train.checkpoint import TENSOR_FILES, open_checkpoint, whole_checkpoints

MakeRun = Callable[..., RunConfig]
CLOCKS = {"samples_per_s", "data_wait", "memory_gib", "seconds"}


def start(run: RunConfig, folder: Path) -> subprocess.Popen[bytes]:
    (folder / "start.json").write_text(to_json(run))
    command = [sys.executable, "-m", "piston.cli", "train", "--from", str(folder / "start.json"), "--train.resume"]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text() if (directory / "metrics.jsonl").exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in whole]


def children(pid: int) -> set[int]:
    """All processes below one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while new := {p for p, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_kill_9_and_resume_give_the_undisturbed_curve(make_run: MakeRun, tmp_path: Path, workers: int) -> None:
    options = {"num_train_steps": 60, "save_interval": 5, "validation_fraction": 0.4, "validation_interval": 10}
    quiet = make_run(**options, checkpoints=tmp_path / "quiet", num_workers=0)
    assert start(quiet, tmp_path).wait(300) == 0
    run = make_run(**options, checkpoints=tmp_path / "killed", num_workers=workers)
    directory, reference = tmp_path / "killed/tiny/run", tmp_path / "quiet/tiny/run"
    rng, kills = random.Random(workers), 0
    while kills < 3:
        process = start(run, tmp_path)
        at_step = rng.randint(12, 17) * (kills + 1)
        while process.poll() is None and not any(line["step"] >= at_step for line in lines(directory)):
            time.sleep(0.002)
        assert process.poll() is None, "the run ended before it could be killed"
        below = children(process.pid)
        assert len(below) >= workers
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        assert whole_checkpoints(directory), "killed before the first checkpoint"
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()], "loader processes outlived the run"
    assert start(run, tmp_path).wait(300) == 0
    assert lines(directory) == lines(reference)
    ours, theirs = open_checkpoint(directory / "60"), open_checkpoint(reference / "60")
    for group in TENSOR_FILES:
        expected = theirs.tensors(group)
        assert all(torch.equal(t, expected[name]) for name, t in ours.tensors(group).items())


@pytest.mark.slow
def test_sigterm_to_the_whole_process_group_saves(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(num_train_steps=100_000, save_interval=100_000, num_workers=2, overwrite=False)
    (tmp_path / "start.json").write_text(to_json(run))
    command = [sys.executable, "-m", "piston.cli", "train", "--from", str(tmp_path / "start.json")]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    directory = tmp_path / "tiny/run"
    while process.poll() is None and len(lines(directory)) < 5:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (saved,) = whole_checkpoints(directory)
    assert saved.step == lines(directory)[-1]["step"]
    assert b"Traceback" not in errors
