"""Cached frames are the data path's own, exactly or within the stated loss; a cache that does not fit is refused."""

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from make_sets import CAMERAS, Spec, make_set
from test_loader import assert_equal

from piston.config.schema import NO_CACHE, SHIPPED_TOKENIZER, RobotConfig, RunConfig
from piston.data import cache_build
from piston.data.cache import MANIFEST, FrameCache, attach, default_directory, read_manifest
from piston.data.cache_build import build, make_plan, merge
from piston.data.coding import CODINGS
from piston.data.dataset import Dataset
from piston.data.lerobot import open_dataset
from piston.data.loader import Loader
from piston.data.prompt import load_tokenizer
from piston.data.resize import pillow_resize_with_pad
from piston.data.transforms import input_transform

SPECS = {"v3.0": Spec(), "v2.1": Spec("v2.1"), "images": Spec(images=True)}
SIZE = (28, 28)

MakeCache = Callable[..., tuple[Dataset, Path]]


@pytest.fixture
def make_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCache:
    """make_cache(kind, coding, size) → a new data set, opened, and the directory of its cache of 4 shard files."""
    monkeypatch.setattr(cache_build, "BATCH_FRAMES", 8)
    monkeypatch.setattr(cache_build, "SHARD_FRAMES", (16, 64))

    def make(kind: str = "v3.0", coding: str = "lossless", size: tuple[int, int] = SIZE) -> tuple[Dataset, Path]:
        ds = open_dataset(make_set(tmp_path / "set", SPECS[kind]))
        directory = default_directory(ds.root, size)
        directory.mkdir(parents=True)
        plan = make_plan(ds, size, coding)
        assert plan.shards == 4
        build(ds, plan, directory, range(plan.shards), 1, lambda _: None)
        merge(plan, directory, verify=True)
        return ds, directory

    return make


@pytest.mark.parametrize("coding", list(CODINGS))
def test_coding(coding: str) -> None:
    ramp = np.add.outer(np.arange(30) * 3, np.arange(44) * 2)[..., None] + np.array([0, 40, 80])
    image = (ramp + np.random.default_rng(0).normal(size=(30, 44, 3)) * 3).clip(0, 255).astype(np.uint8)
    found = np.zeros((2, 30, 44, 3), np.uint8)
    data = np.frombuffer(CODINGS[coding].encode(image), np.uint8)
    CODINGS[coding].decode_into(data, found[0])
    CODINGS[coding].decode_into(data, found[1].transpose(1, 0, 2).copy().transpose(1, 0, 2))
    CODINGS[coding].decode_into(data, found[1][:, ::-1][:, ::-1])
    np.testing.assert_array_equal(found[0], found[1])
    error = np.abs(found[0].astype(int) - image).mean()
    assert error == 0 if CODINGS[coding].exact else 0 < error < 4
    with pytest.raises(ValueError):
        CODINGS[coding].decode_into(data, np.zeros((29, 44, 3), np.uint8))
    with pytest.raises(ValueError):
        CODINGS[coding].decode_into(data[: len(data) // 2], found[0])


@pytest.mark.parametrize("size", [(28, 28), (28, 42), (32, 48), (56, 70)])
@pytest.mark.parametrize("kind", list(SPECS))
def test_lossless_frames_are_those_of_the_data_path(make_cache: MakeCache, kind: str, size: tuple[int, int]) -> None:
    ds, _ = make_cache(kind, size=size)
    cached = attach(ds, None, size)
    assert cached.cache is not None
    assert cached.cache.lossy_content is None
    some = cached.select([3, 1])
    for key in CAMERAS:
        expected = [pillow_resize_with_pad(image, *size) for image in ds.images(key, np.arange(ds.num_frames))]
        found = [pillow_resize_with_pad(image, *size) for image in cached.images(key, np.arange(ds.num_frames))]
        np.testing.assert_array_equal(found, expected)
        rows = np.concatenate([ds.rows_of(3), ds.rows_of(1)])
        order = np.random.default_rng(0).permutation(len(rows))
        found = [pillow_resize_with_pad(image, *size) for image in some.images(key, order)]
        np.testing.assert_array_equal(found, np.stack(expected)[rows[order]])


def run_of() -> RunConfig:
    robot = RobotConfig(
        "toy", {"base_0_rgb": CAMERAS[0], "left_wrist_0_rgb": CAMERAS[1]}, ("observation.state",), "action", 4, 4
    )
    from fake_frames import tiny_run

    run = tiny_run()
    model = dataclasses.replace(run.model, vocab_size=1024, max_token_len=48)
    return dataclasses.replace(run, model=model, data=dataclasses.replace(run.data, robot=robot))


@pytest.mark.parametrize("workers", [0, 2])
def test_lossless_batches_are_bit_equal(make_cache: MakeCache, workers: int) -> None:
    ds, _ = make_cache()
    run, inputs = run_of(), input_transform(run_of(), None, load_tokenizer(SHIPPED_TOKENIZER))
    with (
        Loader(run, ds, inputs) as original,
        Loader(run, attach(ds, None, SIZE), inputs, num_workers=workers) as cached,
    ):
        for a, b in zip(islice(original, 6), islice(cached, 6), strict=True):
            assert a.observation.images.any()
            assert_equal(a, b)


def test_lossy_frames_are_as_near_as_the_manifest_says(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "MEASURE_EVERY", 5)
    ds, directory = make_cache(coding="q95-444")
    cached, manifest = attach(ds, directory, SIZE), read_manifest(directory)
    assert cached.cache is not None
    assert cached.cache.lossy_content == manifest.content
    rows = np.arange(0, ds.num_frames, 5)
    for key in CAMERAS:
        original = np.stack([pillow_resize_with_pad(image, *SIZE) for image in ds.images(key, rows)])[:, 5:23]
        errors = ((cached.images(key, rows)[:, 5:23] - original.astype(float)) ** 2).mean(axis=(1, 2, 3))
        expected = [10 * np.log10(255**2 / errors.mean()), 10 * np.log10(255**2 / errors.max())]
        assert manifest.psnr(key) == pytest.approx(expected, abs=0.01)
        assert expected[1] > 25


def test_other_processes_read_it_too(make_cache: MakeCache) -> None:
    ds, _ = make_cache()
    cached = attach(ds, None, SIZE)
    before = cached.image(CAMERAS[0], 40)
    again = pickle.loads(pickle.dumps(cached))
    np.testing.assert_array_equal(again.image(CAMERAS[0], 40), before)


def test_no_file_stays_open(make_cache: MakeCache) -> None:
    ds, _ = make_cache()
    count = len(os.listdir("/proc/self/fd"))
    cached = attach(ds, None, SIZE)
    cached.images(CAMERAS[0], np.arange(ds.num_frames))
    assert len(os.listdir("/proc/self/fd")) == count


def test_choices(make_cache: MakeCache, caplog: pytest.LogCaptureFixture) -> None:
    ds, directory = make_cache()
    assert attach(ds, NO_CACHE, SIZE) is ds
    assert attach(ds, None, (14, 14)) is ds  # there is none of that size
    moved = Path(shutil.move(directory, ds.root.parent / "elsewhere"))
    assert attach(ds, None, SIZE) is ds
    assert attach(ds, moved, SIZE).cache is not None
    (moved / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"no frame cache.*piston data cache"):
        attach(ds, moved, SIZE)
    shutil.move(moved, directory)
    assert attach(ds, None, SIZE) is ds
    assert "is not finished: original frames are read" in caplog.text


def edit_video(ds: Dataset) -> Path:
    return ds.video_files(CAMERAS[1])[0]


def test_a_changed_source_is_noticed(make_cache: MakeCache) -> None:
    ds, _ = make_cache()
    video = edit_video(ds)
    os.utime(video, ns=(1, 1))  # copied: another time, the same content
    assert attach(ds, None, SIZE).cache is not None
    data = bytearray(video.read_bytes())
    video.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match=rf"source file {video.relative_to(ds.root)} has {len(data) + 1} bytes"):
        attach(ds, None, SIZE)
    data[len(data) // 2] ^= 1
    video.write_bytes(data)
    with pytest.raises(ValueError, match=r"has other content.*piston data cache.*--data.cache off"):
        attach(ds, None, SIZE)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["episodes"].__setitem__(4, 7), "has no episode 4"),
        (lambda plan: plan["lengths"].__setitem__(1, 14), "episode 1 has 14 frames in it, expected 15"),
        (lambda plan: plan["cameras"].pop(), r"has cameras \['observation.images.top'\]"),
        (lambda plan: plan["cameras"][0]["first"].__setitem__(1, 3), "episode 1 of camera .* begins at frame 12 of"),
        (lambda plan: plan.__setitem__("image_size", [14, 14]), r"for \(14, 14\), expected the model's \(28, 28\)"),
        (lambda plan: plan.__setitem__("format", 9), "format 9"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(make_cache: MakeCache, edit: Callable, message: str) -> None:
    ds, directory = make_cache()
    values = json.loads((directory / MANIFEST).read_text())
    edit(values["plan"])
    (directory / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        attach(ds, None, SIZE)


def test_a_damaged_file_is_named(make_cache: MakeCache) -> None:
    ds, directory = make_cache()
    path = directory / "frames-00002.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"{path} is damaged \(has {len(whole) - 100} bytes"):
        attach(ds, None, SIZE).image(CAMERAS[0], 40)
    batch = FrameCache(directory, read_manifest(directory))
    zstd = whole.index(b"\x28\xb5\x2f\xfd")
    path.write_bytes(whole[:zstd] + b"\0\0\0\0" + whole[zstd + 4 :])
    with pytest.raises(ValueError, match=rf"{path} is damaged \(camera `{CAMERAS[0]}`, row 0"):
        batch.read(CAMERAS[0], np.array([32]))
