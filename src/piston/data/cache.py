"""Frames at model resolution, each found in constant time: what a frame cache is, and how it is read.

    DATASET/.piston-cache/224x224/
      frames-00000.arrow   Arrow IPC: one column per camera, one row per frame, each value one frame's bytes (coding.py)
      manifest.json        the plan, and size and hash of every shard file; written last: without it there is no cache

Cache rows are the episodes of the data set one after another, each from its frame 0 on; a shard file holds
`shard_frames` of them. Frames are stored resized as the reference does, without the black margins, which are put back
on reading. A frame that is not larger than the model's is stored as it is.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt8

from piston.config.schema import NO_CACHE
from piston.data.coding import CODINGS, Coding
from piston.data.dataset import Dataset
from piston.data.resize import fitted_size, margins

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = ".piston-cache"  # inside the data set's directory
MANIFEST = "manifest.json"
PLAN = "plan.json"  # what a build that is not finished is building
_ENDS = 1 << 20  # bytes hashed at both ends of a source file: a video's or table's own index lies at one of them


@dataclass(frozen=True)
class FileMark:
    """A source file when the cache was built. `ends` hashes its first and last MiB."""

    size: int
    mtime_ns: int
    ends: str

    @classmethod
    def of(cls, path: Path) -> "FileMark":
        """The file as it is now."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, _hash_ends(path, stat.st_size))

    def difference(self, path: Path) -> str | None:
        """How the file now differs, None if it does not. It is read only if its time of change is another."""
        if not path.is_file():
            return "is gone"
        stat = path.stat()
        if stat.st_size != self.size:
            return f"has {stat.st_size} bytes, had {self.size}"
        if stat.st_mtime_ns != self.mtime_ns and _hash_ends(path, stat.st_size) != self.ends:
            return "has other content"
        return None


def _hash_ends(path: Path, size: int) -> str:
    with path.open("rb") as file:
        found = hashlib.sha256(file.read(_ENDS))
        file.seek(max(_ENDS, size - _ENDS))
        found.update(file.read())
    return found.hexdigest()[:32]


@dataclass(frozen=True)
class CachedCamera:
    """One camera. Sizes: height, width. Episode e's frames begin at frame (or row) `first[e]` of `files[file[e]]`."""

    key: str
    source_size: tuple[int, int]
    stored_size: tuple[int, int]
    files: tuple[str, ...]
    file: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that decides a cache's bytes, and the source files they come from."""

    image_size: tuple[int, int]
    coding: str
    shard_frames: int
    batch_frames: int
    cameras: tuple[CachedCamera, ...]
    episodes: tuple[int, ...]  # the data set's own numbers
    lengths: tuple[int, ...]
    files: dict[str, FileMark]  # by name inside the data set

    @property
    def frames(self) -> int:
        """Rows of the cache."""
        return sum(self.lengths)

    @property
    def shards(self) -> int:
        """Shard files."""
        return -(-self.frames // self.shard_frames)

    def rows(self, shard: int) -> range:
        """Cache rows of a shard file."""
        return range(shard * self.shard_frames, min((shard + 1) * self.shard_frames, self.frames))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        cameras = [
            CachedCamera(
                key=camera["key"],
                source_size=tuple(camera["source_size"]),
                stored_size=tuple(camera["stored_size"]),
                files=tuple(camera["files"]),
                file=tuple(camera["file"]),
                first=tuple(camera["first"]),
            )
            for camera in values["cameras"]
        ]
        return cls(
            image_size=tuple(values["image_size"]),
            coding=values["coding"],
            shard_frames=values["shard_frames"],
            batch_frames=values["batch_frames"],
            cameras=tuple(cameras),
            episodes=tuple(values["episodes"]),
            lengths=tuple(values["lengths"]),
            files={name: FileMark(**mark) for name, mark in values["files"].items()},
        )

    @functools.cached_property
    def digest(self) -> str:
        """The same on every machine that has the same data set: without the files' times."""
        values = self.to_json()
        values["files"] = {name: [mark.size, mark.ends] for name, mark in self.files.items()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ShardMark:
    """A finished shard file. Squared error: mean over pixels, [frames measured, their sum, the largest] by camera."""

    name: str
    rows: int
    size: int
    sha256: str
    frame_bytes: dict[str, int]
    squared_error: dict[str, list[float]]


@dataclass(frozen=True)
class Manifest:
    """A whole cache."""

    plan: Plan
    shards: tuple[ShardMark, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "psnr_db": {camera.key: self.psnr(camera.key) for camera in self.plan.cameras},
            "plan": self.plan.to_json(),
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }

    @property
    def content(self) -> str:
        """Hash of all frames: equal for caches of the same bytes."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Bytes of the shard files."""
        return sum(shard.size for shard in self.shards)

    def psnr(self, key: str) -> tuple[float, float] | None:
        """Of the frames measured while building: PSNR of the mean squared error, and of the worst frame; dB."""
        if CODINGS[self.plan.coding].exact:
            return None
        found = [shard.squared_error[key] for shard in self.shards]
        mean = sum(total for _, total, _ in found) / sum(count for count, _, _ in found)
        return decibels(mean), decibels(max(worst for _, _, worst in found))


def decibels(squared_error: float) -> float:
    """PSNR of 8-bit pixels."""
    return round(10 * float(np.log10(255**2 / max(squared_error, 1e-9))), 2)


def stored_size(size: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width at which frames of `size` are stored: fitted into `image_size`, never enlarged."""
    fitted = fitted_size(size, image_size)
    return size if fitted[0] >= size[0] and fitted[1] >= size[1] else fitted


def default_directory(root: Path, image_size: tuple[int, int]) -> Path:
    """Where the cache of a data set lies."""
    return root / FOLDER / f"{image_size[0]}x{image_size[1]}"


def read_manifest(directory: Path) -> Manifest:
    """Raises ValueError if there is no cache, or one of another format."""
    path = directory / MANIFEST
    if not path.is_file():
        half = (directory / PLAN).is_file()
        raise ValueError(
            f"{directory} holds {'a frame cache that is not finished' if half else 'no frame cache'}, expected "
            f"{MANIFEST}: {'run the same' if half else 'build it with'} `piston data cache`{' again' if half else ''}"
        )
    try:
        values = json.loads(path.read_text())
        if values["plan"]["format"] != FORMAT:
            raise KeyError(f"format {values['plan']['format']}")
        return Manifest(Plan.from_json(values["plan"]), tuple(ShardMark(**shard) for shard in values["shards"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), expected a frame cache of format {FORMAT}: delete {directory} and build "
            "it again with `piston data cache`"
        ) from error


class _Shard:
    """One shard file in memory-mapped form: for every camera and batch, views of the offsets and of all bytes."""

    def __init__(self, path: Path, mark: ShardMark, keys: Sequence[str]) -> None:
        if not path.is_file() or path.stat().st_size != mark.size:
            state = f"has {path.stat().st_size} bytes" if path.is_file() else "is gone"
            raise _damaged(path, f"{state}, expected {mark.size}")
        try:
            with pa.memory_map(str(path)) as source:  # closed at once: what is mapped stays, without an open file
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from error
        self.columns = {key: [self._views(batch.column(key)) for batch in batches] for key in keys}

    @staticmethod
    def _views(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        _, offsets, data = column.buffers()
        assert offsets is not None
        assert data is not None
        return np.frombuffer(offsets, np.int64)[: len(column) + 1], np.frombuffer(data, np.uint8)


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"frame cache file {path} is damaged ({reason}); it was whole when it was built: delete it and run `piston "
        "data cache` again, which makes only what is missing"
    )


class FrameCache:
    """The frames of a cache by camera and cache row. Can be pickled; files are mapped when they are first needed."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.coding: Coding = CODINGS[manifest.plan.coding]
        self._cameras = {camera.key: camera for camera in manifest.plan.cameras}
        self._open: dict[int, _Shard] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __contains__(self, key: str) -> bool:
        return key in self._cameras

    @property
    def lossy_content(self) -> str | None:
        """Hash of the frames, None if they are exactly the data set's own: then a run is the same with and without."""
        return None if self.coding.exact else self.manifest.content

    def describe(self) -> str:
        """`q90-444 at 224×224, PSNR 41.2 dB`."""
        height, width = self.manifest.plan.image_size
        measured = [found[0] for key in self._cameras if (found := self.manifest.psnr(key)) is not None]
        loss = f"PSNR {min(measured):.1f} dB" if measured else "exact"
        return f"{self.coding.name} at {height}×{width}, {loss}"

    def read(self, key: str, rows: Int64[np.ndarray, "n"]) -> UInt8[np.ndarray, "n H W 3"]:
        """Frames on black, as the data path makes them; ones stored unresized as they are."""
        plan, camera = self.manifest.plan, self._cameras[key]
        frames, inside = self._canvas(camera, len(rows))
        for frame, row in zip(frames, rows.tolist(), strict=True):
            number, within = divmod(row, plan.shard_frames)
            batch, at = divmod(within, plan.batch_frames)
            offsets, data = self._shard(number).columns[key][batch]
            try:
                self.coding.decode_into(data[offsets[at] : offsets[at + 1]], frame[inside])
            except ValueError as error:
                path = self.directory / self.manifest.shards[number].name
                raise _damaged(path, f"camera `{key}`, row {within}: {error}") from error
        return frames

    def decoded(self, key: str, data: bytes) -> UInt8[np.ndarray, "H W 3"]:
        """What `read` gives for a frame of these bytes."""
        frames, inside = self._canvas(self._cameras[key], 1)
        self.coding.decode_into(np.frombuffer(data, np.uint8), frames[0][inside])
        return frames[0]

    def _canvas(self, camera: CachedCamera, count: int) -> tuple[UInt8[np.ndarray, "n H W 3"], tuple[slice, slice]]:
        """Black frames, and where in them the stored picture belongs."""
        resized = camera.stored_size != camera.source_size
        size = self.manifest.plan.image_size if resized else camera.stored_size
        inside = margins(camera.stored_size, size)
        return (np.zeros if size != camera.stored_size else np.empty)((count, *size, 3), np.uint8), inside

    def _shard(self, number: int) -> _Shard:
        if number not in self._open:
            mark = self.manifest.shards[number]
            self._open[number] = _Shard(self.directory / mark.name, mark, tuple(self._cameras))
        return self._open[number]

    def first_rows(self, episodes: Int64[np.ndarray, "e"]) -> Int64[np.ndarray, "e"]:
        """Cache row of frame 0 of the episodes with these numbers."""
        plan = self.manifest.plan
        return np.cumsum((0, *plan.lengths))[np.searchsorted(plan.episodes, episodes)]


def attach(ds: Dataset, choice: Path | None, image_size: tuple[int, int]) -> Dataset:
    """The data set, its frames taken from a cache of the model's size, if there is one or `choice` names one.

    `choice`: a directory, `off` for original frames, None for the data set's own cache if it has one. Says in the log
    what it does. Raises ValueError for a cache that does not fit: other sources, size, cameras or episodes.
    """
    if choice == NO_CACHE or not ds.image_keys:
        return ds
    directory = default_directory(ds.root, image_size) if choice is None else choice
    if choice is None and not (directory / MANIFEST).is_file():
        if directory.exists():
            log.warning("the frame cache %s is not finished: original frames are read", directory)
        return ds
    cache = FrameCache(directory, read_manifest(directory))
    check_source(cache.manifest.plan, directory, ds, image_size)
    log.info("frames come from the cache %s: %s", directory, cache.describe())
    return ds.with_cache(cache, cache.first_rows(ds.episode_index))


def check_source(plan: Plan, directory: Path, ds: Dataset, image_size: tuple[int, int]) -> None:
    """Raises ValueError unless the cache was built from the data set as it is now, and has all that is asked of it."""
    wrong = _misfit(plan, ds, image_size)
    if wrong is not None:
        raise ValueError(
            f"frame cache {directory} does not fit data set {ds.root}: {wrong}; delete the cache and build it again "
            "with `piston data cache`, or read original frames with --data.cache off"
        )


def _misfit(plan: Plan, ds: Dataset, image_size: tuple[int, int]) -> str | None:
    if plan.image_size != tuple(image_size):
        return f"its frames are for {plan.image_size}, expected the model's {tuple(image_size)} (height, width)"
    cameras = {camera.key: camera for camera in plan.cameras}
    lacking = [key for key in ds.image_keys if key not in cameras]
    if lacking:
        return f"it has cameras {sorted(cameras)}, expected {lacking} too"
    at = np.minimum(np.searchsorted(plan.episodes, ds.episode_index), len(plan.episodes) - 1)
    absent = np.flatnonzero(np.array(plan.episodes)[at] != ds.episode_index)
    if len(absent):
        return f"it has no episode {ds.episode_index[absent[0]]}, expected all {ds.num_episodes}"
    lengths = np.array(plan.lengths)[at]
    other = np.flatnonzero(lengths != np.diff(ds.episode_starts))
    if len(other):
        e = int(other[0])
        return (
            f"episode {ds.episode_index[e]} has {lengths[e]} frames in it, expected {np.diff(ds.episode_starts)[e]} "
            "as in the data set, which was changed"
        )
    for key in ds.image_keys:
        wrong = _moved(cameras[key], at, ds) or _changed(plan, cameras[key], ds)
        if wrong is not None:
            return wrong
    return None


def _moved(camera: CachedCamera, at: Int64[np.ndarray, "e"], ds: Dataset) -> str | None:
    """Whether an episode's frames are now elsewhere than when the cache was built."""
    files, file, first = ds.places(camera.key)
    names = [relative_name(path, ds.root) for path in files]
    for e in range(ds.num_episodes):
        was = camera.files[camera.file[at[e]]], camera.first[at[e]]
        now = names[int(file[e])], int(first[e])
        if was != now:
            return (
                f"episode {ds.episode_index[e]} of camera `{camera.key}` begins at frame {now[1]} of {now[0]}, was "
                f"expected at frame {was[1]} of {was[0]}: the data set's metadata were changed"
            )
    return None


def _changed(plan: Plan, camera: CachedCamera, ds: Dataset) -> str | None:
    files, file, _ = ds.places(camera.key)
    for n in np.unique(file):
        name = relative_name(files[n], ds.root)
        difference = plan.files[name].difference(files[n])
        if difference is not None:
            return f"source file {name} {difference}, expected it unchanged since the cache was built"
    return None


def relative_name(path: Path, root: Path) -> str:
    """A file's name inside the data set."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
