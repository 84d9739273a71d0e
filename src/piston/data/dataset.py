"""One episode index over a LeRobot data set: rows 0 … num_frames-1 of good episodes, columns in RAM, frames on demand.

Row numbers are this index's own: the rows of an episode are contiguous and in frame order, whatever the files' order.
A Dataset holds no open file: it can be pickled and survives a fork; every thread opens its own few files (handles.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt8

from piston.data.episodes import EpisodeTable, as_integers
from piston.data.layout import Layout
from piston.data.problems import Problem
from piston.data.stills import read_stills
from piston.data.tables import read_parts, stacked
from piston.data.tracks import Track
from piston.data.video import VideoIndex, index_video, read_frames


@dataclass(eq=False)
class _Store:
    """What all views of one data set share: whole columns in file order, and where the images are."""

    layout: Layout
    names: frozenset[str]
    file_starts: Int64[np.ndarray, "f1"]
    columns: dict[str, np.ndarray]
    tracks: dict[str, Track]
    indexes: dict[str, VideoIndex]

    def column(self, key: str) -> np.ndarray:
        """A whole column; one that was not read at opening is read now."""
        if key not in self.columns:
            parts = read_parts(self.layout.data_files, {key: self.layout.shape(key)}) if key in self.names else []
            column = stacked(parts, key)
            if column is None:
                kind = "column is no array of numbers or texts" if key in self.names else "data set has no column"
                known = sorted(name for name in self.names if not self.layout.is_camera(name))
                raise ValueError(
                    f"{kind}: `{key}`, expected one of {known} ({self.layout.root}); correct the robot's key map"
                )
            self.columns[key] = column[0]
        return self.columns[key]

    def index(self, path: Path) -> VideoIndex:
        """The video's index; made now if the data set was opened without checking its videos."""
        name = str(path)
        if name not in self.indexes:
            self.indexes[name] = index_video(path)
        return self.indexes[name]


@runtime_checkable
class CachedFrames(Protocol):
    """Frames already at model size (`cache.FrameCache`); `lossy_content` is None if they are exactly the files'."""

    @property
    def lossy_content(self) -> str | None: ...
    def describe(self) -> str: ...
    def read(self, key: str, rows: Int64[np.ndarray, "n"]) -> UInt8[np.ndarray, "n H W 3"]: ...


@dataclass(frozen=True, eq=False)
class _Cached:
    """A frame cache, and the row of it where each episode of the view begins."""

    frames: CachedFrames
    first: Int64[np.ndarray, "e"]


class Dataset:
    """A LeRobot data set, or, by `select`, some of its episodes. See `piston.data.lerobot.open_dataset`."""

    def __init__(
        self,
        store: _Store,
        episodes: Int64[np.ndarray, "e"],
        rows: Int64[np.ndarray, "r"],
        starts: Int64[np.ndarray, "e1"],
        image_keys: tuple[str, ...],
        problems: tuple[Problem, ...],
        cached: "_Cached | None" = None,
    ) -> None:
        self._store = store
        self._episodes = episodes  # positions in the layout
        self._rows = rows  # positions in the store's columns
        self._columns: dict[str, np.ndarray] = {}
        self._cached = cached
        self.episode_starts = starts  # int64[num_episodes + 1]: an episode's first row
        self.episode_index = store.layout.number[episodes]  # int64[num_episodes]: the data set's own numbers
        self.image_keys = image_keys
        self.problems = problems

    @classmethod
    def build(
        cls,
        layout: Layout,
        table: EpisodeTable,
        tracks: dict[str, Track],
        indexes: dict[str, VideoIndex],
        good: Int64[np.ndarray, "e"],
        problems: Sequence[Problem],
    ) -> "Dataset":
        """The data set of a layout's good episodes (positions)."""
        store = _Store(layout, table.names, table.file_starts, table.columns, tracks, indexes)
        stored = [key for key in layout.image_features if key in tracks or key in table.names]
        whole = cls(store, np.arange(len(layout.number)), table.rows, table.starts, tuple(stored), tuple(problems))
        return whole.select(good)

    @property
    def root(self) -> Path:
        """The directory."""
        return self._store.layout.root

    @property
    def version(self) -> str:
        """`v2.0`, `v2.1` or `v3.0`."""
        return self._store.layout.version

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self._store.layout.fps

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """`features` of meta/info.json, unchanged."""
        return self._store.layout.features

    @property
    def robot_type(self) -> str | None:
        """`robot_type` of meta/info.json."""
        robot = self._store.layout.info.get("robot_type")
        return None if robot is None else str(robot)

    @property
    def tasks(self) -> dict[int, str]:
        """Task texts by task_index."""
        return self._store.layout.tasks

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the data files have (images too)."""
        return self._store.names

    @property
    def data_files(self) -> tuple[Path, ...]:
        """The data set's tables."""
        return self._store.layout.data_files

    def video_files(self, key: str) -> tuple[Path, ...]:
        """The files of a video camera; none for stored images."""
        return self._store.tracks[key].files if key in self._store.tracks else ()

    @property
    def num_episodes(self) -> int:
        """Episodes of this view."""
        return len(self._episodes)

    @property
    def num_frames(self) -> int:
        """Rows of this view."""
        return len(self._rows)

    def __len__(self) -> int:
        return self.num_frames

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}  # a view's columns are gathered again where they are needed

    def column(self, key: str) -> np.ndarray:
        """A low-dimensional column over all rows, [num_frames, …], in the stored dtype; kept in memory from then on.

        Declared shapes are kept ((1,) gives [num_frames, 1]); the index columns (timestamp, frame_index, episode_index,
        index, task_index) are [num_frames]. Text columns are object arrays. Do not write into it.
        Raises ValueError for a column that is not there or is no array.
        """
        if key not in self._columns:
            whole, rows = self._store.column(key), self._rows
            one_piece = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
            self._columns[key] = whole[rows[0] : rows[-1] + 1] if one_piece else whole[rows]
        return self._columns[key]

    def rows_of(self, episode_position: int) -> Int64[np.ndarray, "n"]:
        """All rows of the episode at this position (0 … num_episodes-1) of the view."""
        self._check(episode_position, self.num_episodes, "episode position")
        return np.arange(self.episode_starts[episode_position], self.episode_starts[episode_position + 1])

    def episode_of(self, rows: int | np.integer | Int64[np.ndarray, "*n"]) -> Int64[np.ndarray, "*n"]:
        """Positions of the episodes that rows belong to (an array of no axes for one row)."""
        self._check(rows, self.num_frames, "row")
        return np.asarray(np.searchsorted(self.episode_starts, rows, side="right") - 1, np.int64)

    def chunk_rows(self, row: int | np.integer, horizon: int) -> Int64[np.ndarray, "A"]:
        """`row` and the `horizon - 1` rows after it; past the episode's end its last row is repeated."""
        end = self.episode_starts[self.episode_of(row) + 1]
        return np.minimum(np.arange(row, row + horizon), end - 1)

    def task(self, row: int | np.integer) -> str:
        """The text of the row's task. Raises ValueError if it has none."""
        self._check(row, self.num_frames, "row")
        layout = self._store.layout
        if "task_index" in self._store.names:
            index = int(as_integers(self.column("task_index")[row : row + 1])[0])
            if index in layout.tasks:
                return layout.tasks[index]
            raise ValueError(
                f"row {row} has task_index {index}, expected one of {sorted(layout.tasks)} (meta/tasks of {self.root});"
                " add the text, or turn data.prompt_from_task off and give data.default_prompt"
            )
        e = int(self._episodes[self.episode_of(row)])
        texts = layout.episode_tasks[e] if len(layout.episode_tasks[e]) == 1 else tuple(layout.tasks.values())
        if len(texts) != 1:
            raise ValueError(
                f"episode {layout.number[e]} of {self.root} has {len(texts)} task texts and no column `task_index`, "
                "expected one text; turn data.prompt_from_task off and give data.default_prompt"
            )
        return texts[0]

    def image(self, key: str, row: int | np.integer) -> UInt8[np.ndarray, "H W 3"]:
        """The camera's frame of one row, RGB. Raises ValueError if it cannot be decoded."""
        return self._frames(key, np.array([row]))[0]

    def images(self, key: str, rows: Sequence[int | np.integer] | np.ndarray) -> UInt8[np.ndarray, "n H W 3"]:
        """The camera's frames of several rows, in the order asked; each stretch between keyframes is decoded once."""
        frames = self._frames(key, np.asarray(rows, np.int64))
        if isinstance(frames, np.ndarray):
            return frames
        sizes = {frame.shape for frame in frames}
        if len(sizes) > 1:
            raise ValueError(
                f"frames of camera `{key}` have sizes {sorted(sizes)}, expected one ({self.root}); read them one by "
                "one, or write the data set with one size"
            )
        return np.stack(frames) if frames else np.empty((0, 0, 0, 3), np.uint8)

    def select(self, episode_positions: Sequence[int | np.integer] | np.ndarray) -> "Dataset":
        """A view on the episodes at these positions, in this order; rows are numbered anew from 0."""
        positions = np.asarray(episode_positions, np.int64).reshape(-1)
        self._check(positions, self.num_episodes, "episode position")
        if len(np.unique(positions)) != len(positions):
            raise ValueError(
                f"episode positions {positions.tolist()[:20]} repeat some, expected each once; select distinct ones"
            )
        lengths = np.diff(self.episode_starts)[positions]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        first = np.repeat(self.episode_starts[positions] - starts[:-1], lengths)
        rows = self._rows[first + np.arange(starts[-1])]
        cached = None if self._cached is None else _Cached(self._cached.frames, self._cached.first[positions])
        return Dataset(self._store, self._episodes[positions], rows, starts, self.image_keys, self.problems, cached)

    def with_cache(self, frames: CachedFrames, first: Int64[np.ndarray, "e"]) -> "Dataset":
        """The same view, its images taken from cached `frames`, where the episodes begin at rows `first`."""
        cached = _Cached(frames, first)
        return Dataset(
            self._store, self._episodes, self._rows, self.episode_starts, self.image_keys, self.problems, cached
        )

    @property
    def cache(self) -> CachedFrames | None:
        """Where images come from, if from a frame cache."""
        return None if self._cached is None else self._cached.frames

    def places(self, key: str) -> tuple[tuple[Path, ...], Int64[np.ndarray, "e"], Int64[np.ndarray, "e"]]:
        """Where a camera's episodes are: its files, each episode's file among them, frame (or row) of its first."""
        first = self.episode_starts[:-1]
        return self.video_frames(key, first) if key in self._store.tracks else self._cells(first)

    def video_frames(
        self, key: str, rows: Int64[np.ndarray, "n"]
    ) -> tuple[tuple[Path, ...], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Where the rows' frames of a video camera are: its files, each row's file among them, the frame there."""
        track = self._store.tracks[key]
        position = self.episode_of(rows)
        episodes = self._episodes[position]
        return track.files, track.file[episodes], track.start[episodes] + rows - self.episode_starts[position]

    def video_index(self, path: Path) -> VideoIndex:
        """What is known of one video file."""
        return self._store.index(path)

    def _frames(
        self, key: str, rows: Int64[np.ndarray, "n"]
    ) -> list[UInt8[np.ndarray, "_H _W 3"]] | UInt8[np.ndarray, "n H W 3"]:
        if key not in self.image_keys:
            raise ValueError(
                f"data set has no camera `{key}`, expected one of {list(self.image_keys)} ({self.root}); correct the "
                "robot's key map"
            )
        self._check(rows, self.num_frames, "row")
        if self._cached is not None:
            position = self.episode_of(rows)
            return self._cached.frames.read(key, self._cached.first[position] + rows - self.episode_starts[position])
        frames: list[Any] = [None] * len(rows)
        files, file, place = self.video_frames(key, rows) if key in self._store.tracks else self._cells(rows)
        for n in np.unique(file):
            mine = np.flatnonzero(file == n)
            if key in self._store.tracks:
                found = read_frames(self._store.index(files[n]), place[mine])
            else:
                found = read_stills(files[n], key, place[mine], self.root)
            for at, frame in zip(mine, found, strict=True):
                frames[at] = frame
        return frames

    def _cells(
        self, rows: Int64[np.ndarray, "n"]
    ) -> tuple[tuple[Path, ...], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Where rows are in the data files: the files, each row's file, its row there."""
        stored, starts = self._rows[rows], self._store.file_starts
        file = np.searchsorted(starts, stored, side="right") - 1
        return self._store.layout.data_files, file, stored - starts[file]

    @staticmethod
    def _check(values: int | np.integer | np.ndarray, end: int, what: str) -> None:
        if np.size(values) and not (np.min(values) >= 0 and np.max(values) < end):
            raise IndexError(f"{what} {np.min(values)} … {np.max(values)} is outside 0 … {end - 1}")
