"""A cache is whole or not there, whoever builds which part in which order and whatever is killed meanwhile."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from make_sets import CAMERAS, Spec, make_set
from rich.console import Console

from piston.data import cache_build
from piston.data.cache import MANIFEST, PLAN, Plan, default_directory, read_manifest
from piston.data.cache_build import Forecast, Order, Part, build, cache_command, forecast, make_plan, shard_name
from piston.data.dataset import Dataset
from piston.data.lerobot import open_dataset

SIZE = (28, 28)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 shard files from 57 frames."""
    monkeypatch.setattr(cache_build, "BATCH_FRAMES", 8)
    monkeypatch.setattr(cache_build, "SHARD_FRAMES", (16, 64))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set", Spec())


@pytest.fixture
def said() -> Console:
    return Console(record=True, width=400)


def order(root: Path, **changes) -> Order:
    fields = {
        "path": root, "directory": None, "image_size": SIZE, "cameras": None, "coding": "q90-444", "part": Part(),
        "workers": 1, "bad_episodes": "fail", "tolerance_s": 1e-4,
    }  # fmt: skip
    return Order(**{**fields, **changes})


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_parts_on_two_processes_equal_one_build(root: Path, tmp_path: Path, said: Console) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cache_command(order(root, directory=whole), "build", said) == 0
    copy = shutil.copytree(root, tmp_path / "copy")  # another machine: other files, other times
    for path in copy.rglob("*.mp4"):
        os.utime(path, ns=(1, 1))
    assert cache_command(order(copy, directory=parts, part=Part(2, 2)), "build", said) == 0
    assert not (parts / MANIFEST).exists()
    with pytest.raises(ValueError, match=r"2 of 4 shard files are missing.*\[0, 2\]"):
        cache_command(order(root, directory=parts), "merge", said)
    assert cache_command(order(root, directory=parts, part=Part(1, 2), workers=2), "build", said) == 0
    a, b = contents(whole), contents(parts)
    assert a.keys() == b.keys() == {MANIFEST} | {shard_name(n) + end for n in range(4) for end in ("", ".json")}
    assert read_manifest(whole).content == read_manifest(parts).content
    assert all(a[name] == b[name] for name in a if name != MANIFEST)
    assert cache_command(order(copy, directory=parts), "check", said) == 0


def slow_build(root: Path, directory: Path) -> None:
    def wait(_: int) -> None:
        time.sleep(0.03)

    ds = open_dataset(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_build, "BATCH_FRAMES", 8)
        patch.setattr(cache_build, "SHARD_FRAMES", (16, 64))
        plan = make_plan(ds, SIZE, "q90-444")
        build(ds, plan, directory, range(plan.shards), 1, wait)


def test_a_killed_build_loses_less_than_one_file(root: Path, tmp_path: Path, said: Console) -> None:
    directory = default_directory(root, SIZE)
    directory.mkdir(parents=True)
    process = multiprocessing.get_context("forkserver").Process(target=slow_build, args=(root, directory))
    process.start()
    deadline = time.monotonic() + 60
    while not ((directory / f"{shard_name(1)}.json").exists() and list(directory.glob(".*.tmp"))):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = contents(directory)
    assert MANIFEST not in left
    assert shard_name(3) not in left
    times = {n: (directory / shard_name(n)).stat().st_mtime_ns for n in range(2)}
    assert cache_command(order(root), "build", said) == 0
    assert {n: (directory / shard_name(n)).stat().st_mtime_ns for n in range(2)} == times
    assert not list(directory.glob(".*"))
    assert cache_command(order(root, directory=tmp_path / "whole"), "build", said) == 0
    assert read_manifest(directory).content == read_manifest(tmp_path / "whole").content
    assert cache_command(order(root), "build", said) == 0
    assert "kept: all 4 shard files" in said.export_text()


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """small_disk(n): no file of this process can grow past n bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing_half_done(root: Path, said: Console, small_disk: Callable[[int], None]) -> None:
    ds, directory = open_dataset(root), default_directory(root, SIZE)
    directory.mkdir(parents=True)
    plan = make_plan(ds, SIZE, "q90-444")
    small_disk(10_000)
    with pytest.raises(ValueError, match=r"no space is left.*finished files are kept"):
        build(ds, plan, directory, range(4), 1, lambda _: None)
    small_disk(resource.RLIM_INFINITY)
    assert list(directory.iterdir()) == []
    assert cache_command(order(root), "build", said) == 0
    assert cache_command(order(root), "check", said) == 0


def test_a_disk_too_small_is_known_before(root: Path, said: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "forecast", lambda ds, plan: Forecast(1e18, 1.0, 1.0, None))
    with pytest.raises(ValueError, match=r"the cache needs .* TB"):
        cache_command(order(root), "build", said)


class Other(Dataset):
    """A data set whose images are other ones than those it was planned with."""

    def __init__(self, ds: Dataset) -> None:
        self.__dict__.update(ds.__dict__)


class Deadly(Other):
    def images(self, key: str, rows: Sequence[int | np.integer] | np.ndarray) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_process_is_an_error(root: Path, tmp_path: Path) -> None:
    ds = open_dataset(root)
    with pytest.raises(ValueError, match=r"a process of the build was killed.*same command again"):
        build(Deadly(ds), make_plan(ds, SIZE, "q90-444"), tmp_path, range(4), 2, lambda _: None)


def test_files_of_another_plan_are_refused(root: Path, tmp_path: Path, said: Console) -> None:
    directory = default_directory(root, SIZE)
    assert cache_command(order(root, coding="q80-420", part=Part(1, 2)), "build", said) == 0
    with pytest.raises(ValueError, match=r"does not fit this build \(coding: 'q80-420' → 'q90-444'\).*--out"):
        cache_command(order(root), "build", said)
    (directory / PLAN).unlink()
    with pytest.raises(ValueError, match="another source or with other options"):
        cache_command(order(root), "build", said)


def test_a_build_goes_on_with_its_own_options(root: Path, said: Console) -> None:
    cache_command(order(root, coding="q80-420", cameras=CAMERAS[:1], part=Part(1, 2)), "build", said)
    cache_command(order(root, coding=None), "build", said)
    plan = read_manifest(default_directory(root, SIZE)).plan
    assert plan.coding == "q80-420"
    assert [camera.key for camera in plan.cameras] == [CAMERAS[0]]


def test_a_changed_source_is_not_built_on(root: Path, said: Console) -> None:
    cache_command(order(root), "build", said)
    video = next(root.rglob("videos/**/*.mp4"))
    data = bytearray(video.read_bytes())
    data[len(data) // 2] ^= 1
    video.write_bytes(data)
    with pytest.raises(ValueError, match=rf"source files \['{video.relative_to(root)}'\] were changed"):
        cache_command(order(root), "build", said)


def test_check_and_repair(root: Path, said: Console) -> None:
    directory = default_directory(root, SIZE)
    cache_command(order(root), "build", said)
    before = read_manifest(directory)
    path = directory / shard_name(2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert cache_command(order(root), "check", said) == 1
    with pytest.raises(ValueError, match=rf"\['{path.name}'\].*do not have the content"):
        cache_command(order(root), "merge", said)
    path.unlink()
    assert cache_command(order(root), "check", said) == 1
    assert cache_command(order(root), "build", said) == 0
    assert cache_command(order(root), "check", said) == 0
    assert read_manifest(directory) == before


def test_check_compares_frames_with_the_data_set(root: Path, said: Console) -> None:
    directory = default_directory(root, SIZE)
    cache_command(order(root), "build", said)
    values = json.loads((directory / MANIFEST).read_text())
    values["shards"][0], values["shards"][1] = values["shards"][1], values["shards"][0]
    (directory / MANIFEST).write_text(json.dumps(values))
    assert cache_command(order(root), "check", said) == 1
    assert "not the data set's frame" in said.export_text()


def test_forecast(root: Path, said: Console) -> None:
    ds = open_dataset(root)
    plan = make_plan(ds, SIZE, "q90-444")
    found = forecast(ds, plan)
    cache_command(order(root), "build", said)
    manifest = read_manifest(default_directory(root, SIZE))
    assert found.frame_bytes * plan.frames == pytest.approx(sum(map(sum, stored(manifest))), rel=0.3)
    assert found.gb_per_hour == pytest.approx(found.frame_bytes * 10 * 3600 / 1e9)
    assert found.psnr_db is not None
    text = said.export_text()
    assert "57 of 2 cameras" in text
    assert "32×48 → 18×28" in text
    assert "Training takes frames from it now" in text


def stored(manifest) -> list[list[int]]:
    return [list(shard.frame_bytes.values()) for shard in manifest.shards]


class Wider(Other):
    def images(self, key: str, rows: Sequence[int | np.integer] | np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), 30, 48, 3), np.uint8)


def test_frames_of_two_sizes_are_refused(root: Path, tmp_path: Path) -> None:
    ds = open_dataset(root)
    with pytest.raises(ValueError, match=r"are \(30, 48\) at row 0, expected \(32, 48\)"):
        build(Wider(ds), make_plan(ds, SIZE, "q90-444"), tmp_path, [0], 1, lambda _: None)
    assert not list(tmp_path.glob("*.arrow*"))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_parts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected i/n"):
        Part.parse(text)


def test_plan_as_json(root: Path) -> None:
    ds: Dataset = open_dataset(root)
    plan = make_plan(ds, SIZE, "lossless")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [n for part in (1, 2, 3) for n in Part(part, 3).shards(plan.shards)] == [0, 3, 1, 2]
