"""Records the demo as a LeRobot v3.0 data set: videos, tables and statistics as LeRobot 0.6 writes them.

The directory appears whole or not at all: everything is written beside it and renamed into place at the end. A data set
that was recorded with the same configuration is kept as it is.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.video.frame import PictureType
from jaxtyping import Float, UInt8

from piston.demo.expert import Demonstration, ExpertConfig, demonstrate
from piston.demo.planar_arm import ACTION_NAMES, CAMERA_NAMES, PROMPTS, STATE_NAMES, ArmConfig, scene

REPO_ID = "piston/planar_arm"
ROBOT_TYPE = "planar_arm"
RECIPE_FILE = "demo.json"  # what the data set was recorded with; beside LeRobot's own folders
RECORDER_VERSION = 1  # raise when the same configuration would record other bytes
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
IMAGE_KEYS = {camera: f"observation.images.{camera}" for camera in CAMERA_NAMES}
EPISODES_AT_ONCE = 64  # recorded and drawn together

Progress = Callable[[int, int], None]  # (episodes done, episodes in all)


@dataclass(frozen=True)
class DemoConfig:
    """Everything that decides the bytes of the demo data set."""

    arm: ArmConfig = field(default_factory=ArmConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    episodes: int = 700
    seed: int = 0
    crf: int = 16  # libx264's constant rate factor: 0 lossless … 51 worst
    gop: int = 2  # a keyframe every so many frames, as LeRobot records

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ValueError(f"the demo was asked for {self.episodes} episodes, expected at least 1: raise --episodes")


def build(root: Path, config: DemoConfig | None = None, *, progress: Progress | None = None) -> bool:
    """Records the data set at `root`, unless it is there already; returns whether anything was recorded.

    A data set recorded with another configuration is replaced. Raises ValueError when `root` holds anything else.
    """
    config = config or DemoConfig()
    wanted = {"recorder_version": RECORDER_VERSION, **json.loads(json.dumps(dataclasses.asdict(config)))}
    if root.exists() and recorded_with(root) == wanted:
        return False
    root.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{root.name}.partial-", dir=root.parent))
    try:
        _Recorder(partial, config).record(progress)
        (partial / RECIPE_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        partial.chmod(0o755)
        _put_in_place(partial, root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def recorded_with(root: Path) -> dict:
    """The configuration that the demo data set at `root` was recorded with.

    Raises ValueError when `root` isn't a demo data set: it would be somebody's own data.
    """
    recipe = root / RECIPE_FILE
    if not recipe.is_file():
        if root.is_dir() and not any(root.iterdir()):
            return {}
        raise ValueError(
            f"{root} exists and is not a demo data set (it has no {RECIPE_FILE}), expected a free path or an earlier "
            "demo data set; nothing was changed: choose another path or move the folder away"
        )
    return json.loads(recipe.read_text())


def _put_in_place(partial: Path, root: Path) -> None:
    """Renames `partial` to `root`; an earlier data set there is moved aside first and then deleted."""
    if root.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{root.name}.old-", dir=root.parent))
        os.replace(root, old)
        os.replace(partial, root)
        shutil.rmtree(old)
    else:
        os.replace(partial, root)


class _Recorder:
    """Writes one data set into an empty directory."""

    def __init__(self, root: Path, config: DemoConfig):
        self.root, self.config = root, config
        self.features = _features(config)

    def record(self, progress: Progress | None) -> None:
        """All episodes, then the tables that describe them."""
        summaries: list[_Summary] = []
        data_path = self.root / "data/chunk-000/file-000.parquet"
        data_path.parent.mkdir(parents=True)
        videos = {camera: _Video(self.root, IMAGE_KEYS[camera], self.config) for camera in CAMERA_NAMES}
        schema = _frame_schema()
        with pq.ParquetWriter(data_path, schema, compression="snappy") as table:
            for episode, demonstration in enumerate(self._demonstrations()):
                rows = _rows(demonstration, episode, sum(s.length for s in summaries), self.config.arm.fps)
                table.write_table(pa.table(rows, schema=schema))  # one row group per episode
                for camera, video in videos.items():
                    video.add(demonstration.images[camera])
                summaries.append(_summarise(demonstration, rows))
                if progress is not None:
                    progress(episode + 1, self.config.episodes)
        for video in videos.values():
            video.close()
        self._write_meta(summaries)

    def _demonstrations(self) -> Iterator[Demonstration]:
        """Every episode in order, made in blocks so that memory stays small."""
        config = self.config
        for start in range(0, config.episodes, EPISODES_AT_ONCE):
            numbers = range(start, min(start + EPISODES_AT_ONCE, config.episodes))
            scenes = [scene(config.arm, config.seed, number) for number in numbers]
            yield from demonstrate(config.arm, config.expert, scenes, config.seed + start)

    def _write_meta(self, summaries: "list[_Summary]") -> None:
        meta = self.root / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(_tasks_table(), meta / "tasks.parquet")
        pq.write_table(_episodes_table(summaries, self.config.arm.fps), meta / "episodes/chunk-000/file-000.parquet")
        merged = {key: _merge([s.distributions[key] for s in summaries]) for key in summaries[0].distributions}
        _write_json(meta / "stats.json", {key: distribution.statistics() for key, distribution in merged.items()})
        _write_json(meta / "info.json", self._info(summaries))

    def _info(self, summaries: "list[_Summary]") -> dict:
        return {
            "codebase_version": "v3.0",
            "robot_type": ROBOT_TYPE,
            "total_episodes": len(summaries),
            "total_frames": sum(s.length for s in summaries),
            "total_tasks": len(PROMPTS),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.config.arm.fps,
            "splits": {"train": f"0:{len(summaries)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
            "features": self.features,
        }


class _Video:
    """One camera's mp4: every episode starts on a keyframe, frame i of the file shows at exactly i / fps."""

    def __init__(self, root: Path, key: str, config: DemoConfig):
        path = root / f"videos/{key}/chunk-000/file-000.mp4"
        path.parent.mkdir(parents=True)
        self._container = av.open(str(path), mode="w", options={"movflags": "faststart"})
        size = config.arm.image_size
        self._stream = self._container.add_stream("libx264", rate=config.arm.fps)
        self._stream.width = self._stream.height = size
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": str(config.crf), "g": str(config.gop), "threads": "1"}
        self._tick = Fraction(1, config.arm.fps)
        self._count = 0

    def add(self, images_THW3: UInt8[np.ndarray, "T H W 3"]) -> None:
        """Appends one episode."""
        for position, image_HW3 in enumerate(images_THW3):
            frame = av.VideoFrame.from_ndarray(image_HW3, format="rgb24")
            frame.pts, frame.time_base = self._count, self._tick
            frame.pict_type = PictureType.I if position == 0 else PictureType.NONE
            self._container.mux(self._stream.encode(frame))
            self._count += 1

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()


@dataclass(frozen=True)
class _Distribution:
    """How often each value of one feature occurs: enough for exact moments and quantiles, and it can be merged.

    `values_nF` holds every value of a table column, or is None for images, whose uint8 levels are counted in
    `levels_3L` instead.
    """

    frames: int
    values_nF: np.ndarray | None = None
    levels_3L: np.ndarray | None = None

    def statistics(self) -> dict[str, list]:
        """min, max, mean, std, count and quantiles as LeRobot stores them; images per channel, in [0, 1]."""
        if self.values_nF is not None:
            values_nF = self.values_nF.astype(np.float64)
            found = {
                "min": values_nF.min(0),
                "max": values_nF.max(0),
                "mean": values_nF.mean(0),
                "std": values_nF.std(0),
            }
            found |= {name: np.quantile(values_nF, q, axis=0) for name, q in QUANTILES.items()}
            return {**{name: value.tolist() for name, value in found.items()}, "count": [self.frames]}
        assert self.levels_3L is not None
        found = [_level_statistics(levels_L) for levels_L in self.levels_3L]
        return {**{name: [[[channel[name]]] for channel in found] for name in found[0]}, "count": [self.frames]}


def _level_statistics(levels_L: np.ndarray) -> dict[str, float]:
    """Moments and quantiles of one channel in [0, 1] from the counts of its 256 levels."""
    level_L = np.arange(256) / 255.0
    share_L = levels_L / levels_L.sum()
    mean = float(share_L @ level_L)
    present = np.flatnonzero(levels_L)
    cumulative_L = np.cumsum(share_L)
    quantiles = {name: float(level_L[min(np.searchsorted(cumulative_L, q), 255)]) for name, q in QUANTILES.items()}
    return {
        "min": float(level_L[present[0]]),
        "max": float(level_L[present[-1]]),
        "mean": mean,
        "std": float(np.sqrt(max(share_L @ level_L**2 - mean**2, 0.0))),
        **quantiles,
    }


def _merge(parts: list[_Distribution]) -> _Distribution:
    frames = sum(p.frames for p in parts)
    if parts[0].values_nF is not None:
        return _Distribution(frames, values_nF=np.concatenate([p.values_nF for p in parts if p.values_nF is not None]))
    return _Distribution(frames, levels_3L=np.sum([p.levels_3L for p in parts if p.levels_3L is not None], axis=0))


@dataclass(frozen=True)
class _Summary:
    """What the tables need to know of one episode."""

    length: int
    prompt: str
    distributions: dict[str, _Distribution]


def _summarise(demonstration: Demonstration, rows: dict[str, pa.Array]) -> _Summary:
    length = len(demonstration.state_TS)
    distributions = {}
    for camera in CAMERA_NAMES:
        pixels_3n = demonstration.images[camera].reshape(-1, 3).T
        levels_3L = np.stack([np.bincount(channel, minlength=256) for channel in pixels_3n])
        distributions[IMAGE_KEYS[camera]] = _Distribution(length, levels_3L=levels_3L)
    for key, column in rows.items():
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        distributions[key] = _Distribution(length, values_nF=flat.to_numpy(zero_copy_only=False).reshape(length, -1))
    return _Summary(length, demonstration.prompt, distributions)


def _features(config: DemoConfig) -> dict[str, dict]:
    """info.json's description of every column and camera, with the encoder's settings as LeRobot 0.6 notes them."""
    arm = config.arm
    video = {
        "video.height": arm.image_size,
        "video.width": arm.image_size,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.fps": arm.fps,
        "video.channels": 3,
        "video.g": config.gop,
        "video.crf": config.crf,
        "video.preset": None,
        "video.fast_decode": 0,
        "video.video_backend": "pyav",
        "video.extra_options": {},
        "is_depth_map": False,
        "has_audio": False,
    }
    shape = [arm.image_size, arm.image_size, 3]
    names = ["height", "width", "channels"]
    scalar = {"shape": [1], "names": None}
    return {
        **{key: {"dtype": "video", "shape": shape, "names": names, "info": video} for key in IMAGE_KEYS.values()},
        "observation.state": {"dtype": "float32", "shape": [len(STATE_NAMES)], "names": list(STATE_NAMES)},
        "action": {"dtype": "float32", "shape": [len(ACTION_NAMES)], "names": list(ACTION_NAMES)},
        "timestamp": {"dtype": "float32", **scalar},
        **{key: {"dtype": "int64", **scalar} for key in ("frame_index", "episode_index", "index", "task_index")},
    }


def _frame_schema() -> pa.Schema:
    """The data table's columns, with the feature note that Hugging Face `datasets` reads."""
    widths = {"observation.state": len(STATE_NAMES), "action": len(ACTION_NAMES)}
    scalars = {"timestamp": pa.float32()} | dict.fromkeys(
        ("frame_index", "episode_index", "index", "task_index"), pa.int64()
    )
    fields = [pa.field(key, pa.list_(pa.float32(), width)) for key, width in widths.items()]
    fields += [pa.field(key, kind) for key, kind in scalars.items()]
    notes = {
        key: {"feature": {"dtype": "float32", "_type": "Value"}, "length": width, "_type": "List"}
        for key, width in widths.items()
    } | {
        key: {"dtype": {"float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}
        for key, kind in scalars.items()
    }
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": notes}})})


def _rows(demonstration: Demonstration, episode: int, first_row: int, fps: int) -> dict[str, pa.Array]:
    """One episode's part of the data table."""
    length = len(demonstration.state_TS)
    frame = np.arange(length)
    return {
        "observation.state": _fixed_lists(demonstration.state_TS),
        "action": _fixed_lists(demonstration.action_TD),
        "timestamp": pa.array((frame / fps).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(np.full(length, episode)),
        "index": pa.array(frame + first_row),
        "task_index": pa.array(np.full(length, PROMPTS.index(demonstration.prompt))),
    }


def _fixed_lists(values_TF: Float[np.ndarray, "T F"]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values_TF.reshape(-1)), values_TF.shape[1])


def _tasks_table() -> pa.Table:
    """task_index with the text as the pandas index named `task`, as LeRobot 0.6 writes it without needing pandas."""
    table = pa.table({"task_index": pa.array(range(len(PROMPTS)), pa.int64()), "task": pa.array(PROMPTS, pa.string())})
    columns = [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
            "metadata": None,
        },
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "creator": {"library": "pyarrow"}}
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def _episodes_table(summaries: list[_Summary], fps: int) -> pa.Table:
    """One row per episode: where its rows and frames are, and its own statistics."""
    lengths = np.array([s.length for s in summaries])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    zeros = np.zeros(len(lengths), dtype=np.int64)
    columns: dict[str, object] = {
        "episode_index": np.arange(len(lengths)),
        "tasks": pa.array([[s.prompt] for s in summaries], pa.list_(pa.string())),
        "length": lengths,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": starts,
        "dataset_to_index": ends,
    }
    for key in IMAGE_KEYS.values():
        columns |= {f"videos/{key}/chunk_index": zeros, f"videos/{key}/file_index": zeros}
        columns |= {f"videos/{key}/from_timestamp": starts / fps, f"videos/{key}/to_timestamp": ends / fps}
    for key in summaries[0].distributions:
        statistics = [s.distributions[key].statistics() for s in summaries]
        columns |= {f"stats/{key}/{name}": pa.array([found[name] for found in statistics]) for name in statistics[0]}
    columns |= {"meta/episodes/chunk_index": zeros, "meta/episodes/file_index": zeros}
    return pa.table(columns)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n")
