"""`piston data cache`: predict, build shard files in parallel, verify, and write the manifest last.

A shard file's bytes depend on the plan and its number alone, so any process of any machine may make any of them, in any
order; a file is there whole or not at all, and what is there already is not made again.
"""

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from piston.data.cache import (
    MANIFEST,
    PLAN,
    CachedCamera,
    FileMark,
    FrameCache,
    Manifest,
    Plan,
    ShardMark,
    attach,
    decibels,
    default_directory,
    read_manifest,
    relative_name,
    stored_size,
)
from piston.data.coding import CODINGS, Coding
from piston.data.dataset import Dataset
from piston.data.info import human
from piston.data.lerobot import open_dataset
from piston.data.resize import pillow_resize

BATCH_FRAMES = 256  # rows of one Arrow record batch
SHARD_FRAMES = (512, 8192)  # least and most rows of a shard file: a build that is killed loses less than one
SHARDS = 256  # files aimed at between the two
DECODE_FRAMES = 64  # full-size frames of one camera in memory at once
MEASURE_EVERY = 64  # PSNR is measured on every so many frames
DEFAULT_CODING = "q90-444"
_SAMPLE = (4, 32)  # stretches of so many frames, from which size and time are predicted

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """`i/n`: the i-th of n equal parts of the work, from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Part":
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise ValueError(f"--shard is {text!r}, expected i/n with 1 ≤ i ≤ n: 1/4 … 4/4 for four machines")
        return cls(int(number), int(of))

    def shards(self, count: int) -> list[int]:
        return list(range(self.number - 1, count, self.of))


@dataclass(frozen=True)
class Order:
    """What `piston data cache` was asked for. None: as the directory's own plan has it, else 224×224, q90-444."""

    path: Path
    directory: Path | None
    image_size: tuple[int, int] | None
    cameras: tuple[str, ...] | None
    coding: str | None
    part: Part
    workers: int
    bad_episodes: Literal["fail", "skip"]
    tolerance_s: float


@dataclass(frozen=True)
class Forecast:
    """What a build will need, from a sample of frames."""

    frame_bytes: float  # all cameras
    gb_per_hour: float
    cpu_s: float  # per frame, all cameras
    psnr_db: float | None


def make_plan(ds: Dataset, image_size: tuple[int, int], coding: str) -> Plan:
    """The plan of a cache of all the view's episodes and cameras. Every source file's ends are read."""
    cameras, files = [], {}
    for key in ds.image_keys:
        paths, file, first = ds.places(key)
        used = np.unique(file).tolist()
        for n in used:
            files.setdefault(relative_name(paths[n], ds.root), FileMark.of(paths[n]))
        height, width = ds.image(key, 0).shape[:2]
        names = tuple(relative_name(paths[n], ds.root) for n in used)
        places = tuple(np.searchsorted(used, file).tolist()), tuple(first.tolist())
        size = (height, width)
        cameras.append(CachedCamera(key, size, stored_size(size, image_size), names, *places))
    low, high = SHARD_FRAMES
    batches = math.ceil(min(max(ds.num_frames / SHARDS, low), high) / BATCH_FRAMES)
    return Plan(
        image_size=image_size,
        coding=coding,
        shard_frames=batches * BATCH_FRAMES,
        batch_frames=BATCH_FRAMES,
        cameras=tuple(cameras),
        episodes=tuple(ds.episode_index.tolist()),
        lengths=tuple(np.diff(ds.episode_starts).tolist()),
        files=dict(sorted(files.items())),
    )


def shard_name(number: int) -> str:
    return f"frames-{number:05d}.arrow"


# --- one shard file ---------------------------------------------------------------------------------------------------


def resized_frames(ds: Dataset, camera: CachedCamera, rows: Sequence[int]) -> list[UInt8[np.ndarray, "h w 3"]]:
    """Frames as they are stored, before encoding. Raises ValueError for one of another size."""
    frames = list(ds.images(camera.key, rows))
    if frames and frames[0].shape[:2] != camera.source_size:
        raise ValueError(
            f"frames of camera `{camera.key}` are {frames[0].shape[:2]} at row {rows[0]}, expected "
            f"{camera.source_size} (height, width) as at row 0 ({ds.root}); a cache holds one size: leave those out"
        )
    if camera.stored_size == camera.source_size:
        return frames
    return [pillow_resize(frame, camera.stored_size) for frame in frames]


def write_shard(ds: Dataset, plan: Plan, number: int, directory: Path, tick: Tick) -> None:
    """Makes one shard file and then its mark; a kill in between leaves a file that is made again."""
    name = shard_name(number)
    for stale in directory.glob(f".{name}.*.tmp"):
        stale.unlink()
    temporary = directory / f".{name}.{os.getpid()}.tmp"
    sizes = {camera.key: 0 for camera in plan.cameras}
    errors = {camera.key: [0.0, 0.0, 0.0] for camera in plan.cameras}
    try:
        schema = pa.schema([pa.field(camera.key, pa.large_binary()) for camera in plan.cameras])
        with temporary.open("wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for rows in _pieces(plan.rows(number), plan.batch_frames):
                    columns = [_column(ds, plan, camera, rows, sizes, errors, tick) for camera in plan.cameras]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        with temporary.open("rb") as file:
            sha256 = file_digest(file, "sha256").hexdigest()
        mark = ShardMark(name, len(plan.rows(number)), temporary.stat().st_size, sha256, sizes, errors)
        temporary.replace(directory / name)
        write_json(_mark_path(directory, number), {"plan": plan.digest, **dataclasses.asdict(mark)})
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _column(
    ds: Dataset,
    plan: Plan,
    camera: CachedCamera,
    rows: range,
    sizes: dict[str, int],
    errors: dict[str, list[float]],
    tick: Tick,
) -> pa.Array:
    """One camera's frames of these rows, encoded; adds to the sums of bytes and of squared errors."""
    coding, encoded = CODINGS[plan.coding], []
    for piece in _pieces(rows, DECODE_FRAMES):
        for row, frame in zip(piece, resized_frames(ds, camera, piece), strict=True):
            encoded.append(coding.encode(frame))
            if row % MEASURE_EVERY == 0 and not coding.exact:
                error, found = squared_error(coding, encoded[-1], frame), errors[camera.key]
                errors[camera.key] = [found[0] + 1, found[1] + error, max(found[2], error)]
        tick(len(piece))
    sizes[camera.key] += sum(map(len, encoded))
    return pa.array(encoded, pa.large_binary())


def squared_error(coding: Coding, data: bytes, frame: UInt8[np.ndarray, "h w 3"]) -> float:
    """Mean over the pixels of what coding changed."""
    back = np.empty_like(frame, order="C")
    coding.decode_into(np.frombuffer(data, np.uint8), back)
    return float(np.mean((back.astype(np.float32) - frame) ** 2))


def _pieces(rows: range, size: int) -> Iterator[range]:
    yield from (rows[n : n + size] for n in range(0, len(rows), size))


def _mark_path(directory: Path, number: int) -> Path:
    return directory / f"{shard_name(number)}.json"


def write_json(path: Path, values: dict[str, Any]) -> None:
    """The file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_mark(directory: Path, number: int, plan: Plan) -> ShardMark | None:
    """The mark of a shard file that is there; None if it is to be made. Raises ValueError for another plan's."""
    path, file = _mark_path(directory, number), directory / shard_name(number)
    try:
        values = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if values.pop("plan") != plan.digest:
        raise ValueError(
            f"{file} was built from another source or with other options than this build, expected one plan "
            f"({plan.digest}) for all shard files of {directory}: delete it, or build into another directory (--out)"
        )
    mark = ShardMark(**values)
    return mark if file.is_file() and file.stat().st_size == mark.size else None


# --- the whole --------------------------------------------------------------------------------------------------------


def forecast(ds: Dataset, plan: Plan) -> Forecast:
    """Encodes some stretches of frames and measures bytes, processor time and loss."""
    coding, (count, length) = CODINGS[plan.coding], _SAMPLE
    starts = np.linspace(0, max(0, ds.num_frames - length), count).astype(int).tolist()
    stretches = [range(start, min(start + length, ds.num_frames)) for start in starts]
    frame_bytes, cpu_s, errors = 0.0, 0.0, []
    for camera in plan.cameras:
        begin = time.process_time()
        encoded = [coding.encode(f) for rows in stretches for f in resized_frames(ds, camera, rows)]
        cpu_s += (time.process_time() - begin) / len(encoded)
        frame_bytes += float(np.mean([len(data) for data in encoded]))
        if not coding.exact:
            last = resized_frames(ds, camera, stretches[-1][-1:])[0]
            errors.append(squared_error(coding, encoded[-1], last))
    psnr = decibels(float(np.mean(errors))) if errors else None
    return Forecast(frame_bytes, frame_bytes * ds.fps * 3600 / 1e9, cpu_s, psnr)


def build(ds: Dataset, plan: Plan, directory: Path, numbers: Sequence[int], workers: int, tick: Tick) -> None:
    """Makes the shard files with these numbers. Raises ValueError for a full disk, a killed worker, a bad frame."""
    if workers == 1:
        for number in numbers:
            with _ExplainedDisk(directory):
                write_shard(ds, plan, number, directory, tick)
        return
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(ds, plan, directory, done))
    try:
        waiting, seen = {pool.submit(_work, number) for number in numbers}, 0
        while waiting:
            finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            tick(done.value - seen)
            seen = done.value
            with _ExplainedDisk(directory):
                for future in finished:
                    future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process of the build was killed, expected it to finish; usually memory ran out (see `dmesg`): run the "
            "same command again with fewer --workers, what is finished is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: tuple[Dataset, Plan, Path, Any]


def _start_worker(ds: Dataset, plan: Plan, directory: Path, done: Any) -> None:
    global _job
    _job = ds, plan, directory, done


def _work(number: int) -> None:
    ds, plan, directory, done = _job

    def tick(frames: int) -> None:
        with done.get_lock():
            done.value += frames

    write_shard(ds, plan, number, directory, tick)


@dataclass(frozen=True)
class _ExplainedDisk:
    directory: Path

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = human(shutil.disk_usage(self.directory).free)
            raise ValueError(
                f"no space is left for {self.directory} ({free} free), expected room for the whole cache; nothing is "
                "damaged and finished files are kept: free some, and run the same command again"
            ) from error


def merge(plan: Plan, directory: Path, *, verify: bool) -> Manifest:
    """Writes the manifest. Raises ValueError unless every shard file is there and, with `verify`, has its hash."""
    marks = [read_mark(directory, number, plan) for number in range(plan.shards)]
    missing = [number for number, mark in enumerate(marks) if mark is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {plan.shards} shard files are missing in {directory} (numbers {missing[:20]}), "
            "expected all: run or copy here the --shard parts that make them, then --merge"
        )
    manifest = Manifest(plan, tuple(mark for mark in marks if mark is not None))
    if verify:
        damaged = damaged_files(manifest, directory)
        if damaged:
            raise ValueError(
                f"shard files {damaged[:20]} of {directory} do not have the content they were built with, expected "
                "their hash: copy them again, or delete them and run their --shard part again"
            )
    write_json(directory / MANIFEST, manifest.to_json())
    (directory / PLAN).unlink(missing_ok=True)
    return manifest


def damaged_files(manifest: Manifest, directory: Path) -> list[str]:
    """Shard files that are gone or have another hash than when they were built."""
    damaged = []
    for mark in manifest.shards:
        path = directory / mark.name
        if path.is_file():
            with path.open("rb") as file:
                if file_digest(file, "sha256").hexdigest() == mark.sha256:
                    continue
        damaged.append(mark.name)
    return damaged


def check_cache(ds: Dataset, directory: Path, image_size: tuple[int, int]) -> list[str]:
    """Everything that is wrong with a finished cache: files, source, and frames compared with the data set's own."""
    manifest = read_manifest(directory)
    wrong = [f"{name} is gone or damaged" for name in damaged_files(manifest, directory)]
    if wrong:
        return wrong
    cached = attach(ds, directory, image_size)
    cache = FrameCache(directory, manifest)
    for camera in manifest.plan.cameras:
        if camera.key not in ds.image_keys:
            continue
        for row in np.linspace(0, ds.num_frames - 1, 8).astype(int).tolist():
            expected = cache.decoded(camera.key, cache.coding.encode(resized_frames(ds, camera, [row])[0]))
            error = float(np.mean((cached.image(camera.key, row).astype(np.float32) - expected) ** 2))
            if error > 1.0:  # rounding of another libjpeg is far below one grey level
                wrong.append(f"camera `{camera.key}`, row {row}: not the data set's frame ({decibels(error)} dB)")
    return wrong


# --- the command ------------------------------------------------------------------------------------------------------


def cache_command(order: Order, action: Literal["build", "merge", "check"], console: Console) -> int:
    """`piston data cache PATH`: 0 if what was asked for is done, 1 if a check finds something wrong."""
    image_size = order.image_size or (224, 224)
    directory = order.directory or default_directory(order.path, image_size)
    begun = begun_plan(directory)
    cameras = order.cameras if order.cameras is not None or begun is None else tuple(c.key for c in begun.cameras)
    with console.status(f"opening {order.path}"):
        ds = open_dataset(
            order.path, tolerance_s=order.tolerance_s, bad_episodes=order.bad_episodes, columns=(), cameras=cameras
        )
        if order.image_size is None and begun is not None:
            image_size = begun.image_size
        if action == "check":
            return _report(check_cache(ds, directory, image_size), directory, console)
        plan = make_plan(ds, image_size, order.coding or (DEFAULT_CODING if begun is None else begun.coding))
    if begun is not None:
        check_same_plan(begun, plan, directory)
    if action == "build":
        _build(ds, plan, directory, order, console)
    if action == "build" and any(read_mark(directory, n, plan) is None for n in range(plan.shards)):
        console.print(f"part {order.part.number}/{order.part.of} is done; other parts of {directory} are missing")
        return 0
    manifest = merge(plan, directory, verify=action == "merge")
    loss = ", ".join(f"{c.key} {db[0]:.1f} dB" for c in plan.cameras if (db := manifest.psnr(c.key))) or "exact"
    console.print(f"{directory}: {plan.frames:,} frames × {len(plan.cameras)} cameras, {human(manifest.size)}; {loss}")
    console.print("Training takes frames from it now." if order.directory is None else f"Use: --data.cache {directory}")
    return 0


def begun_plan(directory: Path) -> Plan | None:
    """The plan of what the directory holds, finished or not."""
    if (directory / MANIFEST).is_file():
        return read_manifest(directory).plan
    path = directory / PLAN
    try:
        return Plan.from_json(json.loads(path.read_text())) if path.is_file() else None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), expected a plan: delete {directory} and build it"
        ) from error


def check_same_plan(begun: Plan, plan: Plan, directory: Path) -> None:
    """Raises ValueError if a directory's cache is of another source or of other options than asked for."""
    if begun.digest == plan.digest:
        return
    was, now = begun.to_json(), plan.to_json()
    names = sorted(set(begun.files) | set(plan.files))
    files = [n for n in names if not _same_file(begun.files.get(n), plan.files.get(n))]
    other = [key for key in was if key != "files" and was[key] != now[key]]
    short = {key: f"{was[key]!r} → {now[key]!r}" if len(repr(was[key])) < 80 else key for key in other}
    what = f"source files {files[:5]} were changed" if files else "; ".join(f"{k}: {v}" for k, v in short.items())
    raise ValueError(
        f"{directory} holds a frame cache that does not fit this build ({what}), expected the same source and options: "
        "delete it, or build into another directory with --out"
    )


def _same_file(a: FileMark | None, b: FileMark | None) -> bool:
    return a is not None and b is not None and (a.size, a.ends) == (b.size, b.ends)


def _report(wrong: list[str], directory: Path, console: Console) -> int:
    for line in wrong:
        console.print(f"[red]wrong[/] {line}", highlight=False)
    if not wrong:
        console.print(f"{directory} is whole, and its frames are the data set's")
    return 1 if wrong else 0


def _build(ds: Dataset, plan: Plan, directory: Path, order: Order, console: Console) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    mine = order.part.shards(plan.shards)
    missing = [number for number in mine if read_mark(directory, number, plan) is None]
    if not missing:
        console.print(f"kept: all {len(mine)} shard files of this part are there")
        return
    if not (directory / MANIFEST).exists():
        write_json(directory / PLAN, plan.to_json())
    with console.status("measuring some frames"):
        found = forecast(ds, plan)
    frames = sum(len(plan.rows(number)) for number in missing)
    _print_forecast(found, plan, frames, len(missing), order.workers, console)
    need, free = found.frame_bytes * frames, shutil.disk_usage(directory).free
    if need > free:
        raise ValueError(
            f"the cache needs {human(int(need))}, {directory} has {human(free)} free, expected room for all of it: "
            "free some, choose --out on a larger disk, or a smaller --quality"
        )
    columns = (TextColumn("frames"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("frames", total=frames * len(plan.cameras))
        build(ds, plan, directory, missing, order.workers, lambda count: bar.advance(task, count))


def _print_forecast(found: Forecast, plan: Plan, frames: int, files: int, workers: int, console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    sizes = ", ".join(f"{c.key} {_by(c.source_size)} → {_by(c.stored_size)}" for c in plan.cameras)
    loss = "exact" if found.psnr_db is None else f"PSNR {found.psnr_db:.1f} dB"
    for name, value in (
        ("frames", f"{frames:,} of {len(plan.cameras)} cameras: {sizes}"),
        ("coding", f"{plan.coding}, {loss}"),
        ("space", f"{human(int(found.frame_bytes * frames))}, {found.gb_per_hour:.2f} GB per hour of data"),
        ("time", f"{found.cpu_s * frames / workers / 60:.1f} min with {workers} free cores; {files} shard files"),
    ):
        table.add_row(name, value)
    console.print(table)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
