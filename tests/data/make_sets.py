"""Writes tiny LeRobot data sets of every version, whose frames carry their own number: any decoder can be checked.

Each 32×48 frame is a grid of 24 black or white blocks that spell (camera, episode, frame) in binary, so `code_of` reads
from decoded pixels which frame they are. Written with PyAV and pyarrow alone, by none of the code under test.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.video.frame import PictureType
from av.video.stream import VideoStream
from PIL import Image

HEIGHT, WIDTH, BLOCK = 32, 48, 8
TASKS = ("lift the red cube", "push the blue cube")
CAMERAS = ("observation.images.top", "observation.images.wrist")
X264 = {"g": "2", "crf": "23", "preset": "ultrafast", "bf": "0"}
X264_B = {"g": "2", "crf": "23", "bf": "2", "preset": "medium"}
X264_LONG = {"g": "250", "crf": "23", "bf": "3", "preset": "medium", "x264-params": "scenecut=0"}


@dataclass(frozen=True)
class Spec:
    """What to write."""

    version: str = "v3.0"
    lengths: tuple[int, ...] = (12, 15, 1, 18, 11)
    fps: float = 10
    cameras: tuple[str, ...] = CAMERAS
    images: bool = False  # image features in the tables instead of videos
    codec: str = "libx264"
    options: dict[str, str] = field(default_factory=lambda: dict(X264))
    video_rate: Fraction | int | None = None  # of the video files; None: fps
    start_pts: int = 0  # first timestamp of every video, frames
    container: dict[str, str] = field(default_factory=dict)
    table_episodes: tuple[int, ...] = (3, 2)  # v3.0: episodes per data file
    video_episodes: tuple[tuple[int, ...], ...] = ((2, 3), (5,))  # v3.0: episodes per video file, by camera
    row_groups: bool = True  # v3.0: one row group per episode (else one per file)
    task_column: str = "__index_level_0__"  # v3.0: name of the text column or pandas index


def code_frame(camera: int, episode: int, frame: int) -> np.ndarray:
    """uint8 [32, 48, 3] that spells its number: 3 bits of camera, 9 of episode, 12 of frame."""
    number = (camera << 21) | (episode << 12) | frame
    bits = [(number >> n) & 1 for n in range(24)]
    blocks = np.array(bits, np.uint8).reshape(HEIGHT // BLOCK, WIDTH // BLOCK) * 200 + 25
    grey = np.repeat(np.repeat(blocks, BLOCK, 0), BLOCK, 1)
    return np.stack([grey, np.roll(grey, 1, 1), grey // 2 + 40], -1)


def code_of(image: np.ndarray) -> tuple[int, int, int]:
    """(camera, episode, frame) read back from pixels, however compressed."""
    blocks = image[..., 0].reshape(HEIGHT // BLOCK, BLOCK, WIDTH // BLOCK, BLOCK)[:, 2:6, :, 2:6].mean(axis=(1, 3))
    number = sum(1 << n for n, value in enumerate(blocks.reshape(-1)) if value > 128)
    return number >> 21, (number >> 12) & 0x1FF, number & 0xFFF


def write_video(
    path: Path,
    episodes: Sequence[Sequence[np.ndarray]],
    rate: Fraction | int | float,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    start_pts: int = 0,
    times: Sequence[int] | None = None,
    ticks: int | None = None,
) -> None:
    """One video; every episode starts on a keyframe. `times` (in 1/`ticks` s) replaces the regular times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rate = Fraction(rate).limit_denominator(10_000)
    with av.open(str(path), "w", options=container or {}) as out:
        stream = out.add_stream(codec, rate=rate, options={**(options or {}), **_keyframes(codec, episodes)})
        assert isinstance(stream, VideoStream)
        stream.height, stream.width = episodes[0][0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, ticks)
        n = 0
        for episode in episodes:
            for i, pixels in enumerate(episode):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts = n + start_pts if times is None else times[n]
                frame.time_base = 1 / rate if ticks is None else Fraction(1, ticks)
                if i == 0:
                    frame.pict_type = PictureType.I
                for packet in stream.encode(frame):
                    out.mux(packet)
                n += 1
        for packet in stream.encode(None):
            out.mux(packet)


def _keyframes(codec: str, episodes: Sequence[Sequence[np.ndarray]]) -> dict[str, str]:
    if codec == "libx264":
        return {"forced-idr": "1"}
    if codec == "libsvtav1":
        starts = np.cumsum([0, *(len(episode) for episode in episodes[:-1])])
        return {"svtav1-params": "enable-force-key-frames=1"} if len(starts) > 1 else {}
    return {}


def state_of(episode: int, frame: int) -> np.ndarray:
    """float32[4]: a smooth path, different in each episode."""
    t = frame / 10
    return np.array([np.sin(t + episode), np.cos(t), 0.1 * episode + t, np.sin(2 * t)], np.float32)


def action_of(episode: int, frame: int) -> np.ndarray:
    """float32[4]: the next state."""
    return state_of(episode, frame + 1)


def task_of(episode: int, frame: int) -> int:
    """Episode 3 changes its task half-way."""
    return (episode + (episode == 3 and frame >= 9)) % 2


def png(pixels: np.ndarray) -> bytes:
    """The frame as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_set(root: Path, spec: Spec | None = None) -> Path:
    """Writes the data set and returns its directory."""
    spec = spec or Spec()
    (root / "meta").mkdir(parents=True)
    frames = [
        [[code_frame(c, e, i) for i in range(length)] for e, length in enumerate(spec.lengths)]
        for c in range(len(spec.cameras))
    ]
    write_json(root / "meta/info.json", _info(spec))
    (_write_v3 if spec.version == "v3.0" else _write_v2)(root, spec, frames)
    return root


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON, as LeRobot writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4))


def write_lines(path: Path, values: Sequence[Any]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def edit_json(path: Path, **changes: Any) -> None:
    """Replaces top-level entries of a JSON file."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def edit_table(path: Path, edit: Any) -> None:
    """Rewrites a parquet file with `edit(table)`."""
    pq.write_table(edit(pq.read_table(path)), path)


def set_cell(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    """The table with one value changed."""
    values = table.column(column).to_pylist()
    values[row] = value
    at = table.column_names.index(column)
    return table.set_column(at, table.schema.field(column), pa.array(values, table.schema.field(column).type))


def rows_of(spec: Spec, episode: int, frames: list[list[list[np.ndarray]]]) -> pa.Table:
    """The data table of one episode."""
    length = spec.lengths[episode]
    steps = range(length)
    vector = pa.list_(pa.float32(), 4)
    columns: dict[str, pa.Array] = {}
    if spec.images:
        for c, key in enumerate(spec.cameras):
            cells = [{"bytes": png(frames[c][episode][i]), "path": f"frame_{i:06d}.png"} for i in steps]
            columns[key] = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    columns |= {
        "observation.state": pa.array([state_of(episode, i) for i in steps], vector),
        "action": pa.array([action_of(episode, i) for i in steps], vector),
        "gripper": pa.array([np.float32(i % 2) for i in steps], pa.float32()),
        "next.done": pa.array([i == length - 1 for i in steps], pa.bool_()),
        "timestamp": pa.array(np.arange(length, dtype=np.float64) / spec.fps, pa.float32()),
        "frame_index": pa.array(steps, pa.int64()),
        "episode_index": pa.array([episode] * length, pa.int64()),
        "index": pa.array(range(sum(spec.lengths[:episode]), sum(spec.lengths[: episode + 1])), pa.int64()),
        "task_index": pa.array([task_of(episode, i) for i in steps], pa.int64()),
    }
    return pa.table(columns)


def _info(spec: Spec) -> dict[str, Any]:
    v3 = spec.version == "v3.0"
    camera: dict[str, Any] = {"dtype": "image" if spec.images else "video", "shape": [HEIGHT, WIDTH, 3]}
    camera["names"] = ["height", "width", "channel" if spec.version == "v2.0" else "channels"]
    if not spec.images:
        details = {"video.fps": spec.fps, "video.codec": "h264", "video.pix_fmt": "yuv420p", "has_audio": False}
        camera["video_info" if spec.version == "v2.0" else "info"] = {**details, "video.is_depth_map": False}
    names = ["x", "y", "z", "turn"]
    features: dict[str, Any] = {key: dict(camera) for key in spec.cameras}
    features |= {
        "observation.state": {"dtype": "float32", "shape": [4], "names": names},
        "action": {"dtype": "float32", "shape": [4], "names": names},
        "gripper": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }
    features |= {
        key: {"dtype": "int64", "shape": [1], "names": None}
        for key in ("frame_index", "episode_index", "index", "task_index")
    }
    episode, chunk = "episode_{episode_index:06d}", "chunk-{episode_chunk:03d}"
    piece = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    video = f"videos/{{video_key}}/{piece}.mp4" if v3 else f"videos/{chunk}/{{video_key}}/{episode}.mp4"
    return {
        "codebase_version": spec.version,
        "robot_type": "toy",
        "total_episodes": len(spec.lengths),
        "total_frames": sum(spec.lengths),
        "total_tasks": len(TASKS),
        "chunks_size": 1000 if v3 else 3,
        "fps": spec.fps,
        "splits": {"train": f"0:{len(spec.lengths)}"},
        "data_path": f"data/{piece}.parquet" if v3 else f"data/{chunk}/{episode}.parquet",
        "video_path": None if spec.images else video,
        "features": features,
        "something_new": {"unknown": True},
    }


def _video(root: Path, spec: Spec, path: str, episodes: Sequence[Sequence[np.ndarray]]) -> None:
    rate = spec.fps if spec.video_rate is None else spec.video_rate
    write_video(root / path, episodes, rate, spec.codec, spec.options, spec.container, spec.start_pts)


def _write_v2(root: Path, spec: Spec, frames: list[list[list[np.ndarray]]]) -> None:
    tasks = [{"task_index": n, "task": task} for n, task in enumerate(TASKS)]
    write_lines(root / "meta/tasks.jsonl", tasks)
    episodes = []
    for e, length in enumerate(spec.lengths):
        used = sorted({task_of(e, i) for i in range(length)})
        episodes.append({"episode_index": e, "tasks": [TASKS[n] for n in used], "length": length})
        chunk = f"chunk-{e // 3:03d}"
        path = root / f"data/{chunk}/episode_{e:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows_of(spec, e, frames), path)
        if not spec.images:
            for c, key in enumerate(spec.cameras):
                _video(root, spec, f"videos/{chunk}/{key}/episode_{e:06d}.mp4", [frames[c][e]])
    write_lines(root / "meta/episodes.jsonl", episodes)
    if spec.version == "v2.0":
        write_json(
            root / "meta/stats.json", {"action": {"mean": [0] * 4, "std": [1] * 4, "min": [-1] * 4, "max": [1] * 4}}
        )
    else:
        stats = [{"episode_index": e, "stats": {}} for e in range(len(spec.lengths))]
        write_lines(root / "meta/episodes_stats.jsonl", stats)


def _write_v3(root: Path, spec: Spec, frames: list[list[list[np.ndarray]]]) -> None:
    ends = np.cumsum(spec.lengths).tolist()
    rows: list[dict[str, Any]] = [
        {
            "episode_index": e,
            "tasks": [TASKS[n] for n in sorted({task_of(e, i) for i in range(length)})],
            "length": length,
            "dataset_from_index": ends[e] - length,
            "dataset_to_index": ends[e],
            "stats/action/mean": [0.0] * 4,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for e, length in enumerate(spec.lengths)
    ]
    first = 0
    for n, count in enumerate(spec.table_episodes):
        path = root / f"data/chunk-000/file-{n:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = [rows_of(spec, e, frames) for e in range(first, first + count)]
        if n % 2:  # column order differs between shards
            tables = [table.select(table.column_names[::-1]) for table in tables]
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables if spec.row_groups else [pa.concat_tables(tables)]:
                writer.write_table(table)
        for e in range(first, first + count):
            rows[e] |= {"data/chunk_index": 0, "data/file_index": n}
        first += count
    for c, key in enumerate(() if spec.images else spec.cameras):
        first = 0
        for n, count in enumerate(spec.video_episodes[c % len(spec.video_episodes)]):
            _video(root, spec, f"videos/{key}/chunk-000/file-{n:03d}.mp4", frames[c][first : first + count])
            start = 0.0
            for e in range(first, first + count):
                end = start + spec.lengths[e] / spec.fps
                place = {"chunk_index": 0, "file_index": n, "from_timestamp": start, "to_timestamp": end}
                rows[e] |= {f"videos/{key}/{name}": value for name, value in place.items()}
                start = end
            first += count
    half = len(rows) // 2
    for n, shard in enumerate((rows[:half], rows[half:])):
        path = root / f"meta/episodes/chunk-000/file-{n:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(shard)
        pq.write_table(table.select(table.column_names[::-1]) if n else table, path)
    tasks = pa.table({"task_index": pa.array(range(len(TASKS)), pa.int64()), spec.task_column: list(TASKS)})
    pq.write_table(tasks, root / "meta/tasks.parquet")


def edit_episode(root: Path, episode: int, **changes: Any) -> None:
    """Changes values of one episode's row in meta/episodes (v3.0); `__` in a name stands for `/`."""
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        rows = pq.read_table(path).to_pylist()
        if any(row["episode_index"] == episode for row in rows):
            for row in rows:
                if row["episode_index"] == episode:
                    row |= {name.replace("__", "/"): value for name, value in changes.items()}
            pq.write_table(pa.Table.from_pylist(rows), path)
