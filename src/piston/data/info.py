"""What a data set holds: version, robot, episodes, hours, tasks, cameras, columns, bytes; nothing is decoded."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from piston.data.dataset import Dataset
from piston.data.episodes import as_integers
from piston.data.layout import image_size
from piston.data.lerobot import inspect_dataset
from piston.data.problems import BadDataset
from piston.data.tables import TableFault, open_table
from piston.data.video import VideoFault


@dataclass(frozen=True)
class TaskInfo:
    """One task and how much of it there is."""

    index: int
    text: str
    frames: int


@dataclass(frozen=True)
class CameraInfo:
    """One usable camera; codec and keyframe distance are those of its first video file."""

    key: str
    stored: str  # "video" or "image"
    height: int | None
    width: int | None
    codec: str | None
    pix_fmt: str | None
    longest_gop: int | None  # frames between keyframes: what reading one frame may have to decode
    files: int
    size: int  # bytes of its video files; images are inside the tables


@dataclass(frozen=True)
class FeatureInfo:
    """One feature as info.json declares it, and the type of its column (None: not stored)."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    names: list[str] | None
    stored: str | None


@dataclass(frozen=True)
class DatasetInfo:
    """Everything `piston data info` shows. Episodes, frames and hours are the usable ones."""

    root: str
    version: str
    robot_type: str | None
    fps: float
    episodes: int
    frames: int
    hours: float
    episode_frames: tuple[int, int, int]  # shortest, median, longest
    left_out: int  # episodes with errors: see `piston data check`
    tasks: list[TaskInfo]
    cameras: list[CameraInfo]
    features: list[FeatureInfo]
    size: dict[str, int]  # bytes on disk by folder

    def to_json(self) -> dict[str, Any]:
        """Nested dictionaries and lists."""
        return dataclasses.asdict(self)


def info(root: Path) -> DatasetInfo:
    """Describes the data set at `root`. Raises BadDataset if it has no usable episode."""
    inspection = inspect_dataset(root, check_videos=False, columns=())
    ds = inspection.dataset
    if ds is None:
        raise BadDataset(root, [problem for problem in inspection.problems if problem.severity == "error"])
    lengths = np.diff(ds.episode_starts)
    return DatasetInfo(
        root=str(root),
        version=ds.version,
        robot_type=ds.robot_type,
        fps=ds.fps,
        episodes=ds.num_episodes,
        frames=ds.num_frames,
        hours=ds.num_frames / ds.fps / 3600,
        episode_frames=(int(lengths.min()), int(np.median(lengths)), int(lengths.max())),
        left_out=len(inspection.left_out),
        tasks=_tasks(ds),
        cameras=[_camera(ds, key) for key in ds.image_keys],
        features=_features(ds),
        size=bytes_by_folder(root),
    )


def bytes_by_folder(root: Path) -> dict[str, int]:
    """Bytes on disk under data/, videos/, meta/ and anything else, the total last."""
    size = dict.fromkeys(("data", "videos", "meta", "other"), 0)
    for path in root.rglob("*"):
        if path.is_file():
            folder = path.relative_to(root).parts[0]
            size[folder if folder in size else "other"] += path.stat().st_size
    return {**size, "total": sum(size.values())}


def _tasks(ds: Dataset) -> list[TaskInfo]:
    counts: dict[int, int] = {}
    if "task_index" in ds.columns:
        values, times = np.unique(as_integers(ds.column("task_index")), return_counts=True)
        counts = dict(zip(values.tolist(), times.tolist(), strict=True))
    return [TaskInfo(index, text, counts.get(index, 0)) for index, text in sorted(ds.tasks.items())]


def _camera(ds: Dataset, key: str) -> CameraInfo:
    height, width = image_size(ds.features[key]) or (None, None)
    files = ds.video_files(key)
    if not files:
        return CameraInfo(key, "image", height, width, None, None, None, 0, 0)
    there = [path for path in files if path.is_file()]
    size = sum(path.stat().st_size for path in there)
    for path in there:
        try:
            index = ds.video_index(path)
        except VideoFault:
            continue
        gop = index.longest_gop
        return CameraInfo(key, "video", index.height, index.width, index.codec, index.pix_fmt, gop, len(files), size)
    return CameraInfo(key, "video", height, width, None, None, None, len(files), size)


def _features(ds: Dataset) -> list[FeatureInfo]:
    stored: dict[str, str] = {}
    for path in ds.data_files:
        try:
            with open_table(path) as table:
                stored = {field.name: str(field.type) for field in table.schema_arrow}
            break
        except TableFault:
            continue
    features = []
    for key, feature in ds.features.items():
        shape, names = feature.get("shape"), feature.get("names")
        features.append(
            FeatureInfo(
                key=key,
                dtype=str(feature["dtype"]),
                shape=tuple(int(n) for n in shape) if isinstance(shape, list | tuple) else None,
                names=[str(name) for name in names] if isinstance(names, list | tuple) else None,
                stored="video" if ds.features[key]["dtype"] == "video" else stored.get(key),
            )
        )
    return features


def render_info(found: DatasetInfo) -> RenderableType:
    """The same as tables."""
    shortest, median, longest = found.episode_frames
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("data set", found.root),
        ("format", f"LeRobot {found.version}"),
        ("robot", found.robot_type or "not stated"),
        ("episodes", f"{found.episodes:,}" + (f" ({found.left_out} with errors left out)" if found.left_out else "")),
        ("frames", f"{found.frames:,} at {found.fps:g} fps = {found.hours:.3g} h"),
        ("episode length", f"{shortest:,} … {longest:,} frames, median {median:,}"),
        ("on disk", ", ".join(f"{folder} {human(size)}" for folder, size in found.size.items() if size)),
    ):
        facts.add_row(Text(name, style="bold"), Text(value))
    cameras = Table("camera", "stored as", "size", "codec", "frames per keyframe", "files", "bytes", title="Cameras")
    for camera in found.cameras:
        size = f"{camera.height}×{camera.width}" if camera.height else "?"
        codec = f"{camera.codec} {camera.pix_fmt}" if camera.codec else "PNG or JPEG" if not camera.files else "?"
        gop = "" if camera.longest_gop is None else str(camera.longest_gop)
        weight = human(camera.size) if camera.size else ""
        cameras.add_row(Text(camera.key), camera.stored, size, codec, gop, str(camera.files or ""), weight)
    features = Table("feature", "dtype", "shape", "stored as", title="Features")
    for feature in found.features:
        shape = "" if feature.shape is None else "×".join(map(str, feature.shape))
        features.add_row(Text(feature.key), feature.dtype, shape, Text(feature.stored or "not stored"))
    tasks = Table("task", "text", "frames", title="Tasks")
    for task in found.tasks[:20]:
        tasks.add_row(str(task.index), Text(task.text), f"{task.frames:,}")
    rest = Text(f"… and {len(found.tasks) - 20} more tasks") if len(found.tasks) > 20 else Text()
    return Group(facts, cameras, features, tasks, rest)


def human(size: int) -> str:
    """Bytes as kB, MB, GB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
