"""Which rows are which episode, and in which order: found by the rows' own episode_index, whole or reported."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from piston.data.layout import Layout
from piston.data.problems import BadDataset, Problem, Severity
from piston.data.tables import FilePart, stacked

_MOST_VALUES = 4096  # per row: a column with more is not read unless it is asked for by name
_NUMERIC = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")
REWRITE = "record, convert or repair it again, or leave it out (bad_episodes=skip)"


@dataclass(frozen=True)
class EpisodeTable:
    """The rows of every episode of a layout: `rows[starts[e]:starts[e + 1]]`, counted over all data files in order."""

    rows: Int64[np.ndarray, "r"]
    starts: Int64[np.ndarray, "e1"]
    file_starts: Int64[np.ndarray, "f1"]
    file_of_row: Int64[np.ndarray, "a"]  # like the columns in file order, not in the order of `rows`
    columns: dict[str, np.ndarray]
    names: frozenset[str]  # columns that at least one data file has
    misshapen: dict[str, Bool[np.ndarray, "a"] | None]  # rows whose value has another shape than declared (NaN here)
    lacking: dict[str, Int64[np.ndarray, "m"]]  # data files without the column (NaN or 0 here)
    problems: list[Problem]

    @property
    def lengths(self) -> Int64[np.ndarray, "e"]:
        """Rows found per episode."""
        return np.diff(self.starts)


def checked_columns(layout: Layout) -> tuple[str, ...]:
    """Declared columns that are read and checked unless others are named: numbers, of moderate size."""
    shapes = {key: layout.shape(key) for key, feature in layout.features.items() if feature.get("dtype") in _NUMERIC}
    return tuple(key for key, shape in shapes.items() if shape is None or np.prod(shape, dtype=int) <= _MOST_VALUES)


def find_episodes(
    layout: Layout, parts: Sequence[FilePart], wanted: Sequence[str], required: Sequence[str]
) -> EpisodeTable:
    """Sorts the rows of all data files into episodes; their contents are checked elsewhere (contents.py).

    Raises BadDataset if a required column is missing.
    """
    names = frozenset().union(*(part.names for part in parts))
    sizes = [part.rows for part in parts]
    file_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    file_of_row = np.repeat(np.arange(len(parts)), sizes)
    columns, lacking = {}, {}
    for name in wanted:
        column = stacked(parts, name)
        if column is not None:
            columns[name], lacking[name] = column
    _require_columns(layout, columns, names, required)
    for name in layout.image_features:  # images stay in their tables; which tables have none is worth knowing
        if layout.features[name]["dtype"] == "image" and name in names:
            without = [n for n, part in enumerate(parts) if part.rows and name not in part.names]
            lacking[name] = np.array(without, np.int64)
    finder = _Finder(layout, parts, columns, file_of_row)
    rows, starts = finder.episodes()
    misshapen = {name: _misshapen(parts, file_starts, name) for name in columns}
    return EpisodeTable(rows, starts, file_starts, file_of_row, columns, names, misshapen, lacking, finder.problems)


def _require_columns(
    layout: Layout, columns: dict[str, np.ndarray], names: frozenset[str], required: Sequence[str]
) -> None:
    needed = [*required] + (["episode_index"] if layout.file_episode is None else [])
    for name in needed:
        if name in columns or not names:
            continue
        near = difflib.get_close_matches(name, sorted(names), n=1)
        problem = Problem(
            "error",
            "missing-column",
            f"data tables have no numeric column `{name}`" if name in names else f"data tables have no column `{name}`",
            f"columns {sorted(names)}",
            f"`{name}`",
            f"did you mean `{near[0]}`? correct the robot's key map" if near else "correct the robot's key map",
        )
        raise BadDataset(layout.root, [problem])
    absent = [
        key
        for key, feature in layout.features.items()
        if names and key not in names and feature.get("dtype") != "video" and key not in layout.image_features
    ]
    for key in absent:
        layout.problems.append(
            Problem(
                "warning",
                "absent-column",
                f"column `{key}` is declared but not stored",
                "in no data file",
                "a column in the data files",
                "nothing to do unless you want to use it",
                file="meta/info.json",
            )
        )


def _misshapen(
    parts: Sequence[FilePart], file_starts: Int64[np.ndarray, "f1"], name: str
) -> Bool[np.ndarray, "r"] | None:
    """Rows of the whole table whose value of a column has the wrong shape; None if none has."""
    if not any(name in part.wrong_shape and part.wrong_shape[name].any() for part in parts):
        return None
    wrong = np.zeros(int(file_starts[-1]), bool)
    for n, part in enumerate(parts):
        if name in part.wrong_shape:
            wrong[file_starts[n] : file_starts[n + 1]] = part.wrong_shape[name]
    return wrong


def as_integers(column: np.ndarray) -> Int64[np.ndarray, "n"]:
    """An index column as int64; nulls become -1, which no episode, frame or task has."""
    if column.dtype.kind == "f":
        column = np.where(np.isfinite(column), column, -1)
    return column.astype(np.int64)


class _Finder:
    """Sorts rows into episodes. `problems` collects what does not fit the metadata."""

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[FilePart],
        columns: dict[str, np.ndarray],
        file_of_row: Int64[np.ndarray, "r"],
    ) -> None:
        self.layout, self.parts, self.columns, self.file_of_row = layout, parts, columns, file_of_row
        self.problems: list[Problem] = []
        self.faulty: set[int] = set()  # episodes (positions) whose own file cannot be read: said once

    def episodes(self) -> tuple[Int64[np.ndarray, "r"], Int64[np.ndarray, "e1"]]:
        """Rows in order of episode and frame, and where each episode starts among them."""
        self._unreadable_files()
        position = self._episode_of_rows()
        rows = np.flatnonzero(position >= 0)
        frame = self._frame_index(position)
        jumps, steps = np.diff(position[rows]), np.diff(frame[rows])
        if not ((jumps > 0) | ((jumps == 0) & (steps > 0))).all():
            rows = rows[np.lexsort((frame[rows], position[rows]))]
        count = len(self.layout.number)
        starts = np.searchsorted(position[rows], np.arange(count + 1)).astype(np.int64)
        lengths = np.diff(starts)
        expected = np.arange(len(rows)) - np.repeat(starts[:-1], lengths)
        uneven = any_per_episode(frame[rows] != expected, starts)
        stated = self.layout.length
        odd = np.flatnonzero(uneven | ((lengths != stated) & (stated >= 0)) | (lengths == 0))
        if len(odd) == 0:
            self._wrong_files(rows, starts)
            return rows, starts
        groups = {int(e): self._repaired(int(e), rows[starts[e] : starts[e + 1]], frame) for e in odd}
        pieces = [groups.get(e, rows[starts[e] : starts[e + 1]]) for e in range(count)]
        rows = np.concatenate(pieces)
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        self._wrong_files(rows, starts)
        return rows, starts

    def _unreadable_files(self) -> None:
        for n, part in enumerate(self.parts):
            if part.fault is None:
                continue
            episode = None
            if self.layout.file_episode is not None:
                episode = int(self.layout.file_episode[n])
                self.faulty.add(int(np.searchsorted(self.layout.number, episode)))
            file = self.layout.relative(self.layout.data_files[n])
            self.problems.append(part.fault.problem(file=file, episode=episode))

    def _episode_of_rows(self) -> Int64[np.ndarray, "r"]:
        """Position of every row's episode, -1 for rows of no known episode."""
        layout = self.layout
        said = as_integers(self.columns["episode_index"]) if "episode_index" in self.columns else None
        numbers = np.empty(0, np.int64) if said is None else said  # no data file can be read: there are no rows
        if layout.file_episode is not None:
            numbers = layout.file_episode[self.file_of_row]
            if said is not None and (said != numbers).any():
                self._strangers(said, numbers)
        position = np.searchsorted(layout.number, numbers).astype(np.int64)
        inside = np.minimum(position, len(layout.number) - 1)
        known = layout.number[inside] == numbers if len(layout.number) else np.zeros(len(numbers), bool)
        if not known.all():
            orphans = np.unique(numbers[~known])
            files = np.unique(self.file_of_row[~known])
            self.problems.append(
                Problem(
                    "warning",
                    "orphan-rows",
                    "rows belong to episodes that the metadata does not list",
                    f"{int((~known).sum())} rows of episodes {some(orphans)} in {len(files)} file(s)",
                    "every row's episode in meta/episodes",
                    "they are not used; a recorder that was stopped leaves such rows",
                    file=layout.relative(layout.data_files[int(files[0])]),
                )
            )
        return np.where(known, position, -1)

    def _strangers(self, said: Int64[np.ndarray, "r"], numbers: Int64[np.ndarray, "r"]) -> None:
        for file in np.unique(self.file_of_row[said != numbers]):
            rows = self.file_of_row == file
            self.problems.append(
                Problem(
                    "error",
                    "wrong-episode-index",
                    "column `episode_index` contradicts the file's name",
                    some(np.unique(said[rows])),
                    str(int(numbers[rows][0])),
                    f"renumber the column or the file, or {REWRITE}",
                    file=self.layout.relative(self.layout.data_files[int(file)]),
                    episode=int(numbers[rows][0]),
                )
            )

    def _frame_index(self, position: Int64[np.ndarray, "r"]) -> Int64[np.ndarray, "r"]:
        """The column, or, where it is not stored, the count of an episode's rows in file order."""
        if "frame_index" in self.columns:
            return as_integers(self.columns["frame_index"])
        order = np.argsort(position, kind="stable")
        ordered = position[order]
        first = np.searchsorted(ordered, ordered)
        frame = np.empty(len(position), np.int64)
        frame[order] = np.arange(len(position)) - first
        return frame

    def _repaired(self, e: int, rows: Int64[np.ndarray, "n"], frame: Int64[np.ndarray, "r"]) -> Int64[np.ndarray, "m"]:
        """One whole copy of an episode whose rows do not fit: from the metadata's file, else the first that has it."""
        length = int(self.layout.length[e])
        files = self.file_of_row[rows]
        for file in [int(self.layout.pointed_file[e]), *np.unique(files)]:
            copy = rows[files == file]
            if len(copy) and len(copy) < len(rows) and np.array_equal(frame[copy], np.arange(len(copy))):
                if length not in (-1, len(copy)):
                    continue
                what, value, expected = "episode is stored more than once", f"{len(rows)} rows", str(len(copy))
                fix = f"the copy in {self._file(file)} is used"
                self._report("repeated-rows", e, file, what, value, expected, fix, "warning")
                return copy
        self._explain(e, rows, frame, length)
        return rows

    def _explain(self, e: int, rows: Int64[np.ndarray, "n"], frame: Int64[np.ndarray, "r"], length: int) -> None:
        if e in self.faulty:
            return
        if len(rows) == 0:
            fix = f"the recorder was stopped, or a file is missing: {REWRITE}"
            expected = "at least 1" if length <= 0 else str(length)
            named = int(self.layout.pointed_file[e])
            self._report("empty-episode", e, named, "episode has no rows", "0", expected, fix)
            return
        numbers, file = frame[rows], int(self.file_of_row[rows[0]])
        if not np.array_equal(numbers, np.arange(len(rows))):
            at = int(np.argmax(numbers != np.arange(len(rows))))
            what, value = "frame_index is not 0, 1, 2, …", f"{int(numbers[at])} in the episode's row {at}"
            self._report("frame-index", e, file, what, value, str(at), REWRITE)
        if length not in (-1, len(rows)):
            what, fix = "episode length differs", f"the metadata or the table is incomplete: {REWRITE}"
            self._report("episode-length", e, file, what, f"{len(rows)} rows", str(length), fix)

    def _wrong_files(self, rows: Int64[np.ndarray, "r"], starts: Int64[np.ndarray, "e1"]) -> None:
        if self.layout.file_episode is not None:
            return
        here = self.file_of_row[rows]
        pointed = np.repeat(self.layout.pointed_file, np.diff(starts))
        wrong = any_per_episode(here != pointed, starts)
        if wrong.any():
            e = int(np.argmax(wrong))
            what = f"metadata names another data file than the one with the rows ({int(wrong.sum())} episodes)"
            value, expected = self._file(int(self.layout.pointed_file[e])), self._file(int(here[starts[e]]))
            fix = "nothing to do: rows are found by their episode_index"
            self._report("wrong-file", e, int(here[starts[e]]), what, value, expected, fix, "warning")

    def _file(self, n: int) -> str:
        return "a file that does not exist" if n < 0 else self.layout.relative(self.layout.data_files[n])

    def _report(
        self, kind: str, e: int, file: int, what: str, value: str, expected: str, fix: str, severity: Severity = "error"
    ) -> None:
        name = None if file < 0 else self._file(file)
        episode = int(self.layout.number[e])
        self.problems.append(Problem(severity, kind, what, value, expected, fix, file=name, episode=episode))


def any_per_episode(flags: Bool[np.ndarray, "r"], starts: Int64[np.ndarray, "e1"]) -> Bool[np.ndarray, "e"]:
    """Whether any row of each episode is flagged (an empty episode: no)."""
    total = np.concatenate([[0], np.cumsum(flags)])
    return total[starts[1:]] > total[starts[:-1]]


def some(values: np.ndarray, most: int = 8) -> str:
    """`3, 5, 7, …` for a message."""
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (", …" if len(values) > most else "")
