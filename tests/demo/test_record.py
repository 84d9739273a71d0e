import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from piston.config.robots import PLANAR_ARM
from piston.data.lerobot import open_dataset
from piston.demo import record
from piston.demo.expert import Demonstration, demonstrate
from piston.demo.planar_arm import ACTION_NAMES, PROMPTS, STATE_NAMES, scene
from piston.demo.record import IMAGE_KEYS, DemoConfig, build

SMALL = DemoConfig(episodes=7)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "data"
    seen: list[tuple[int, int]] = []
    assert build(root, SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, 7) for n in range(7)]
    return root


@pytest.fixture(scope="module")
def shown() -> list[Demonstration]:
    scenes = [scene(SMALL.arm, SMALL.seed, n) for n in range(SMALL.episodes)]
    return demonstrate(SMALL.arm, SMALL.expert, scenes, SMALL.seed)


def test_reader_finds_what_was_shown(recorded: Path, shown: list[Demonstration]):
    ds = open_dataset(recorded)
    assert (ds.version, ds.fps, ds.num_episodes) == ("v3.0", SMALL.arm.fps, SMALL.episodes)
    assert ds.problems == ()
    assert sorted(ds.image_keys) == sorted(IMAGE_KEYS.values())
    states = np.concatenate([one.state_TS for one in shown])
    actions = np.concatenate([one.action_TD for one in shown])
    np.testing.assert_array_equal(ds.column("observation.state"), states)
    np.testing.assert_array_equal(ds.column("action"), actions)
    assert [ds.task(int(row)) for row in ds.episode_starts[:-1]] == [PROMPTS[n % 3] for n in range(SMALL.episodes)]


def test_every_frame_is_the_simulators_within_compression(recorded: Path, shown: list[Demonstration]):
    ds = open_dataset(recorded)
    rows = np.arange(ds.num_frames)
    for camera, key in IMAGE_KEYS.items():
        drawn = np.concatenate([one.images[camera] for one in shown]).astype(int)
        decoded = ds.images(key, rows).astype(int)
        error_n = np.abs(decoded - drawn).mean(axis=(1, 2, 3))
        assert error_n.max() < 6.0, camera  # of 255; chroma is stored at half resolution
        moved = np.flatnonzero(np.abs(drawn[1:] - drawn[:-1]).mean(axis=(1, 2, 3)) > 3.0)
        assert len(moved) > 20
        swapped = np.abs(decoded[moved + 1] - drawn[moved]).mean(axis=(1, 2, 3))
        assert (error_n[moved + 1] < swapped).all(), camera  # a frame off by one would be found


def test_robot_entry_fits_the_recording(recorded: Path):
    ds = open_dataset(recorded)
    assert set(PLANAR_ARM.cameras.values()) == set(ds.image_keys)
    assert ds.column(PLANAR_ARM.action_key).shape[1] == PLANAR_ARM.action_dim == len(ACTION_NAMES)
    assert ds.column(PLANAR_ARM.state_keys[0]).shape[1] == PLANAR_ARM.state_dim == len(STATE_NAMES)


def test_files_are_lerobots(recorded: Path):
    names = {str(p.relative_to(recorded)) for p in recorded.rglob("*") if p.is_file()}
    videos = {f"videos/{key}/chunk-000/file-000.mp4" for key in IMAGE_KEYS.values()}
    assert names == videos | {
        "demo.json",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
    }
    data = pq.ParquetFile(recorded / "data/chunk-000/file-000.parquet")
    assert data.num_row_groups == SMALL.episodes
    schema = data.schema_arrow
    assert str(schema.field("action").type) == "fixed_size_list<element: float>[2]"
    assert str(schema.field("timestamp").type) == "float"
    assert b"huggingface" in schema.metadata
    episodes = pq.read_table(recorded / "meta/episodes/chunk-000/file-000.parquet")
    assert episodes.column("dataset_to_index").to_pylist()[-1] == SMALL.episodes * SMALL.expert.steps
    assert episodes.column("tasks").to_pylist()[1] == [PROMPTS[1]]
    assert {"stats/action/q99", f"stats/{IMAGE_KEYS['base']}/mean", "meta/episodes/file_index"} <= set(
        episodes.column_names
    )


def test_tasks_table_has_the_text_as_its_pandas_index(recorded: Path):
    table = pq.read_table(recorded / "meta/tasks.parquet")
    assert table.column("task").to_pylist() == list(PROMPTS)
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_statistics_are_those_of_the_whole_set(recorded: Path, shown: list[Demonstration]):
    stats = json.loads((recorded / "meta/stats.json").read_text())
    actions = np.concatenate([one.action_TD for one in shown]).astype(np.float64)
    for name, value in {
        "min": actions.min(0), "max": actions.max(0), "mean": actions.mean(0), "std": actions.std(0),
        "q01": np.quantile(actions, 0.01, axis=0), "q50": np.quantile(actions, 0.5, axis=0),
    }.items():  # fmt: skip
        np.testing.assert_allclose(stats["action"][name], value, atol=1e-12, err_msg=name)
    assert stats["action"]["count"] == [len(actions)]
    pixels = np.concatenate([one.images["wrist"] for one in shown]) / 255.0
    camera = stats[IMAGE_KEYS["wrist"]]
    np.testing.assert_allclose(np.ravel(camera["mean"]), pixels.mean((0, 1, 2)), atol=1e-12)
    np.testing.assert_allclose(np.ravel(camera["std"]), pixels.std((0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(np.ravel(camera["max"]), pixels.max((0, 1, 2)), atol=1e-12)
    np.testing.assert_allclose(
        np.ravel(camera["q90"]), np.quantile(pixels, 0.9, axis=(0, 1, 2), method="inverted_cdf"), atol=1e-12
    )
    assert np.shape(camera["mean"]) == (3, 1, 1)


def test_the_same_configuration_records_the_same_numbers_and_is_kept(recorded: Path, tmp_path: Path):
    other = tmp_path / "again"
    assert build(other, SMALL)
    a, b = open_dataset(recorded), open_dataset(other)
    np.testing.assert_array_equal(a.column("action"), b.column("action"))
    before = {p: p.stat().st_mtime_ns for p in other.rglob("*")}
    assert not build(other, SMALL)
    assert {p: p.stat().st_mtime_ns for p in other.rglob("*")} == before


def test_another_configuration_replaces_the_recording(tmp_path: Path):
    root = tmp_path / "data"
    assert build(root, dataclasses.replace(SMALL, episodes=2))
    assert build(root, dataclasses.replace(SMALL, episodes=3, seed=1))
    assert open_dataset(root).num_episodes == 3
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_somebody_elses_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a demo data set"):
        build(tmp_path, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_an_interrupted_recording_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> Iterator[Demonstration]:
        yield from demonstrate(SMALL.arm, SMALL.expert, [scene(SMALL.arm, 0, 0)], 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(record._Recorder, "_demonstrations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "data", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_no_episodes_is_refused():
    with pytest.raises(ValueError, match="0 episodes"):
        DemoConfig(episodes=0)
