"""Samples and frames per processor-second of the loader, random access, 3 cameras, chunk 50; formats; against LeRobot.

    python benchmarks/loader.py                                       a set of its own: 480×640 h264, keyframe every 30
    python benchmarks/loader.py --lerobot-python VENV/bin/python      the same set through LeRobot's own loader as well

Everything runs on one thread in this order: LeRobot, original video, each cache. A sample is three frames, state, 50
actions; Piston's also includes what LeRobot leaves to do later: resize, prompt tokens, noise, draws. Figures
are processor time (children included), since wall time on a shared machine means nothing; ratios of one run count.
"""

import dataclasses
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from av.video.frame import PictureType
from av.video.stream import VideoStream
from PIL import Image
from rich.console import Console
from rich.table import Table

from piston.config.recipes import recipe
from piston.config.robots import generic
from piston.config.schema import SHIPPED_TOKENIZER, RunConfig
from piston.data.cache import attach, read_manifest
from piston.data.cache_build import build, make_plan, merge
from piston.data.coding import CODINGS
from piston.data.lerobot import Dataset, open_dataset
from piston.data.loader import Loader
from piston.data.prompt import load_tokenizer
from piston.data.transforms import input_transform

CAMERAS = tuple(f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist"))
HEIGHT, WIDTH, FPS, JOINTS = 480, 640, 30, 14
SEED_NATIVE, SEED_CACHE = 6.15, 2.13  # GB per hour of 3 cameras: published figures this work is measured against

LEROBOT = """
import json, resource, sys, time, torch
torch.set_num_threads(1)
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, backend, batch, samples, fps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
chunk = {"action": [i / fps for i in range(50)]}
ds = LeRobotDataset("local/bench", root=root, video_backend=backend, delta_timestamps=chunk)
g = torch.Generator().manual_seed(0)
loader = iter(torch.utils.data.DataLoader(ds, batch_size=batch, shuffle=True, generator=g))
next(loader)
start = time.process_time()
for _ in range(samples // batch):
    next(loader)
print(json.dumps((time.process_time() - start) / (samples // batch * batch)))
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    root: Path | None = None  # a LeRobot set with three 480×640 cameras, 14 joints; None: one is made in `work`
    work: Path = Path("/tmp/piston-loader-bench")
    gop: int = 30  # of the set that is made
    frames: int = 600  # per camera, of the set that is made
    batch_size: int = 8
    samples: int = 160  # per row of original video; a cache gives ten times as many
    lerobot_python: Path | None = None  # interpreter of a venv that holds lerobot
    lerobot_backends: tuple[str, ...] = ("torchcodec", "pyav")
    json: Path | None = None


# --- a set to measure on ----------------------------------------------------------------------------------------------


def texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth noise of three scales, [height, width, 3], mean 0, deviation 1."""
    total = np.zeros((height, width, 3), np.float32)
    for scale in (12, 40, 120):
        coarse = rng.normal(size=(height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        layers = [Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        total += np.stack([np.asarray(layer) for layer in layers], -1) * scale**0.5
    return (total - total.mean()) / total.std()


def scene(camera: int, count: int) -> Iterator[np.ndarray]:
    """A swaying textured table, an object that moves over it, and sensor noise of 5 grey levels."""
    rng = np.random.default_rng(camera)
    table, thing = texture(rng, HEIGHT + 80, WIDTH + 80) * 35 + 120, texture(rng, 120, 120) * 40 + 140
    for i in range(count):
        y, x = int(40 + 30 * np.sin(i / 25)), int(40 + 30 * np.cos(i / 31))
        frame = table[y : y + HEIGHT, x : x + WIDTH].copy()
        top, left = int(170 + 160 * np.sin(i / 17)), int(250 + 240 * np.cos(i / 23))
        frame[top : top + 120, left : left + 120] = thing
        frame += rng.normal(size=(HEIGHT, WIDTH, 1)).astype(np.float32) * 5
        yield frame.clip(0, 255).astype(np.uint8)


def write_video(path: Path, camera: int, count: int, gop: int, episode: int) -> None:
    """h264 crf 23 with a keyframe every `gop` frames and at every episode's start."""
    path.parent.mkdir(parents=True)
    options = {"g": str(gop), "crf": "23", "preset": "veryfast", "forced-idr": "1", "threads": "1"}
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=FPS, options=options)
        assert isinstance(stream, VideoStream)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for i, pixels in enumerate(scene(camera, count)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, FPS)
            if i % episode == 0:
                frame.pict_type = PictureType.I
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def make_set(root: Path, count: int, gop: int, episode: int = 150) -> Path:
    """A LeRobot v3.0 set of three cameras with episodes of 150 frames."""
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    count -= count % episode
    for n, key in enumerate(CAMERAS):
        write_video(partial / f"videos/{key}/chunk-000/file-000.mp4", n, count, gop, episode)
    row = np.arange(count)
    joints = np.sin(row[:, None] / 30 + np.arange(JOINTS)).astype(np.float32)
    vector = lambda values: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), JOINTS)  # noqa: E731
    data = {
        "observation.state": vector(joints),
        "action": vector(np.roll(joints, -1, 0)),
        "timestamp": pa.array((row % episode / FPS).astype(np.float32)),
        "frame_index": row % episode,
        "episode_index": row // episode,
        "index": row,
        "task_index": np.zeros(count, np.int64),
    }
    starts = np.arange(0, count, episode)
    zeros = np.zeros(len(starts), np.int64)
    episodes = {
        "episode_index": np.arange(len(starts)),
        "tasks": pa.array([["move the object"]] * len(starts)),
        "length": zeros + episode,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": starts,
        "dataset_to_index": starts + episode,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    for key in CAMERAS:
        episodes |= {f"videos/{key}/chunk_index": zeros, f"videos/{key}/file_index": zeros}
        episodes |= {
            f"videos/{key}/from_timestamp": starts / FPS,
            f"videos/{key}/to_timestamp": (starts + episode) / FPS,
        }
    for name, columns in (("data", data), ("meta/episodes", episodes)):
        path = partial / name / "chunk-000" / "file-000.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), path)
    tasks = pa.table({"task_index": np.zeros(1, np.int64), "task": ["move the object"]})
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy, "metadata": None}
        for name, (pandas, numpy) in kinds.items()
    ]
    note = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "creator": {"library": "pyarrow"}}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(note)}), partial / "meta" / "tasks.parquet")
    (partial / "meta" / "info.json").write_text(json.dumps(info(count, len(starts)), indent=2))
    (partial / "meta" / "stats.json").write_text(json.dumps(stats()))
    return partial.rename(root)


def info(count: int, episodes: int) -> dict:
    """meta/info.json."""
    video = {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    details = {"video.fps": FPS, "video.codec": "h264", "video.pix_fmt": "yuv420p", "has_audio": False}
    details |= {"video.height": HEIGHT, "video.width": WIDTH, "video.channels": 3, "video.is_depth_map": False}
    scalars = ("frame_index", "episode_index", "index", "task_index")
    return {
        "codebase_version": "v3.0",
        "robot_type": "bench",
        "total_episodes": episodes,
        "total_frames": count,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": FPS,
        "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            **{key: {**video, "info": details} for key in CAMERAS},
            **{key: {"dtype": "float32", "shape": [JOINTS], "names": None} for key in ("observation.state", "action")},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **{key: {"dtype": "int64", "shape": [1], "names": None} for key in scalars},
        },
    }


def stats() -> dict:
    """meta/stats.json, of the shape readers expect; nobody normalises by it here."""
    flat = {name: [0.0] * JOINTS for name in ("min", "mean")} | {name: [1.0] * JOINTS for name in ("max", "std")}
    image = {name: [[[value]]] * 3 for name, value in (("min", 0.0), ("mean", 0.5), ("max", 1.0), ("std", 0.2))}
    return {"observation.state": flat, "action": flat, **dict.fromkeys(CAMERAS, image)}


# --- measuring --------------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Processor time of this process and its finished children."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def run_for(options: Options) -> RunConfig:
    """π0.5 at its usual sizes: 3 cameras at 224×224, chunk 50, prompt with state."""
    run = recipe("pi05_libero")
    slots = dict(zip(run.model.cameras, CAMERAS, strict=True))
    robot = generic(cameras=slots, state_dim=JOINTS, action_dim=JOINTS)
    model = dataclasses.replace(run.model, action_horizon=50, discrete_state_input=True)
    data = dataclasses.replace(run.data, robot=robot, tokenizer=SHIPPED_TOKENIZER, num_workers=0)
    train = dataclasses.replace(run.train, batch_size=options.batch_size)
    return dataclasses.replace(run, model=model, data=data, train=train)


def piston_seconds(run: RunConfig, ds: Dataset, samples: int) -> float:
    """Processor seconds per sample of finished batches."""
    logging.disable(logging.WARNING)  # the small tokenizer is meant
    inputs = input_transform(run, None, load_tokenizer(SHIPPED_TOKENIZER))
    with Loader(run, ds, inputs) as loader:
        next(loader)
        batches = max(1, samples // run.train.batch_size)
        start = cpu_seconds()
        for _ in range(batches):
            next(loader)
        return (cpu_seconds() - start) / (batches * run.train.batch_size)


def lerobot_seconds(options: Options, root: Path, backend: str) -> float | str:
    """Processor seconds per sample of LeRobot's loader, or why there is no figure."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [str(root), backend, str(options.batch_size), str(options.samples // 2), str(FPS)]
    done = subprocess.run(
        [str(options.lerobot_python), "-c", LEROBOT, *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:90]
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def formats(ds: Dataset, directories: dict[str, Path], samples: int) -> Table:
    """What each coding costs and loses on this set."""
    ratios = f"of {SEED_NATIVE}", f"of {SEED_CACHE}"
    table = Table("format", "B/frame", "GB/h", *ratios, "encode ms", "decode /s", "PSNR")
    videos = sum(path.stat().st_size for key in ds.image_keys for path in ds.video_files(key))

    def row(name: str, size: float, *rest: str) -> None:
        per_hour = size * 3 * 30 * 3600 / 1e9
        shares = f"{per_hour / SEED_NATIVE:.2f}×", f"{per_hour / SEED_CACHE:.2f}×"
        table.add_row(name, f"{size:,.0f}", f"{per_hour:.2f}", *shares, *rest)

    row("original video", videos / ds.num_frames / len(CAMERAS), "", "", "")
    rng = np.random.default_rng(0)
    for name, directory in directories.items():
        manifest, coding = read_manifest(directory), CODINGS[name]
        cached = attach(ds, directory, (224, 224))
        images = [cached.image(CAMERAS[0], int(r))[28:196] for r in rng.integers(0, ds.num_frames, 64)]
        start = cpu_seconds()
        for image in images:
            coding.encode(image)
        encode_ms = (cpu_seconds() - start) / len(images) * 1e3
        start = cpu_seconds()
        for row_number in rng.integers(0, ds.num_frames, samples):
            cached.image(CAMERAS[0], int(row_number))
        speed = samples / (cpu_seconds() - start)
        size = sum(sum(shard.frame_bytes.values()) for shard in manifest.shards) / ds.num_frames / len(CAMERAS)
        loss = [found[0] for key in CAMERAS if (found := manifest.psnr(key)) is not None]
        row(name, size, f"{encode_ms:.2f}", f"{speed:,.0f}", f"{np.mean(loss):.1f} dB" if loss else "exact")
    return table


def main(options: Options) -> None:
    """Makes the set and its caches, if they are not there, and measures."""
    console, found = Console(), {}
    root = options.root or options.work / f"g{options.gop}-{options.frames}"
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        make_set(root, options.frames, options.gop)
    ds = open_dataset(root)
    directories = {name: options.work / "caches" / root.name / name for name in CODINGS}
    for name, directory in directories.items():
        if not (directory / "manifest.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            plan = make_plan(ds, (224, 224), name)
            start = cpu_seconds()
            build(ds, plan, directory, range(plan.shards), 1, lambda _: None)
            merge(plan, directory, verify=False)
            console.print(f"built {name}: {3 * ds.num_frames / (cpu_seconds() - start):.0f} frames per CPU-second")
    run = run_for(options)
    if options.lerobot_python is not None:
        for backend in options.lerobot_backends:
            found[f"LeRobot, {backend}"] = lerobot_seconds(options, root, backend)
    found["Piston, original video"] = piston_seconds(run, ds, options.samples)
    for name, directory in directories.items():
        cached = attach(ds, directory, (224, 224))
        found[f"Piston, cache {name}"] = piston_seconds(run, cached, options.samples * 10)
    gop = max(ds.video_index(path).longest_gop for key in ds.image_keys for path in ds.video_files(key))
    title = f"{ds.num_frames:,} frames × {len(CAMERAS)}, at most {gop} frames per keyframe, batch {options.batch_size}"
    table = Table("loader", "CPU ms/sample", "samples/CPU-s", "frames/CPU-s", "ratio", title=title)
    base = next((s for s in found.values() if isinstance(s, float)), None)
    for name, seconds in found.items():
        if isinstance(seconds, str):
            table.add_row(name, seconds)
            continue
        assert base is not None
        row = f"{seconds * 1e3:.2f}", f"{1 / seconds:,.1f}", f"{3 / seconds:,.0f}", f"{base / seconds:.1f}×"
        table.add_row(name, *row)
    console.print(table)
    console.print(formats(ds, directories, 600))
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds_per_sample": found, "python": sys.version}, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Options))
