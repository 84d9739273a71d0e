"""Whether the rows of episodes can be used: on the time grid, with a known task, finite, of the declared shape."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

from piston.data.episodes import REWRITE, EpisodeTable, as_integers, some
from piston.data.layout import FPS_DIGITS, INDEX_COLUMNS, Layout
from piston.data.problems import Problem, Severity


def check_contents(layout: Layout, table: EpisodeTable, tolerance_s: float, required: Sequence[str]) -> list[Problem]:
    """One problem per episode and kind, at the first row that shows it.

    Numbers that are not finite are errors, except in columns of rewards and ends (`next.…`) that nobody required.
    """
    checks = _Checks(layout, table)
    checks.timestamps(tolerance_s)
    checks.tasks()
    for name in table.columns:
        checks.shape(name)
        checks.lacking(name, table.lacking[name])
        checks.finite(name, error=name in required or not name.startswith("next."))
    for name in layout.image_features:
        if layout.features[name]["dtype"] == "image":
            checks.lacking(name, table.lacking.get(name, np.empty(0, np.int64)))
    return checks.problems


class _Checks:
    """The checks; `problems` collects what they find."""

    def __init__(self, layout: Layout, table: EpisodeTable) -> None:
        self.layout, self.table = layout, table
        self.problems: list[Problem] = []
        self.frame = np.arange(len(table.rows)) - np.repeat(table.starts[:-1], table.lengths)

    def timestamps(self, tolerance_s: float) -> None:
        """Every timestamp is frame/fps within tolerance, plus the rounding of a float32 column."""
        if "timestamp" not in self.table.columns or self.table.columns["timestamp"].dtype.kind not in "fiu":
            return
        stored = self.table.columns["timestamp"][self.table.rows]
        grid = self.frame / self.layout.fps
        slack = np.spacing(grid.astype(np.float32)) if stored.dtype.itemsize < 8 else 0.0
        off = ~(np.abs(stored - grid) <= tolerance_s + slack + FPS_DIGITS * grid)
        for e, row in self._first(off):
            times = stored[self.table.starts[e] : self.table.starts[e + 1]].astype(np.float64)
            step = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
            rate = f" (the episode's rows are {1 / step:.4g} per second)" if step > 0 else ""
            value = f"{stored[row]:.6g} s in frame {self.frame[row]}{rate}"
            expected = f"{grid[row]:.6g} s ± {tolerance_s:g} s at {self.layout.fps:g} fps"
            fix = "correct `fps` in meta/info.json or the column, set --data.tolerance-s, or leave the episode out"
            what, fix = "timestamp is off the frame grid", f"{fix} (bad_episodes=skip)"
            self._report("timestamp", e, row, what, value, expected, fix)

    def tasks(self) -> None:
        """Every task_index has a text."""
        if "task_index" not in self.table.columns or not self.layout.tasks:
            return
        index = as_integers(self.table.columns["task_index"])[self.table.rows]
        for e, row in self._first(~np.isin(index, list(self.layout.tasks))):
            known = f"one of {some(np.array(sorted(self.layout.tasks)))}"
            fix = f"add the task to meta/tasks, or {REWRITE}"
            self._report("unknown-task", e, row, "task_index has no text", str(index[row]), known, fix)

    def finite(self, name: str, *, error: bool) -> None:
        """No NaN or infinity, save in rows that are NaN because they have no fitting value (reported as such)."""
        column = self.table.columns[name]
        if column.dtype.kind != "f" or name in INDEX_COLUMNS:
            return
        filled = np.isin(self.table.file_of_row, self.table.lacking[name])
        misshapen = self.table.misshapen[name]
        if misshapen is not None:
            filled |= misshapen
        bad = ~np.isfinite(column).reshape(len(column), -1).all(axis=1) & ~filled
        for e, row in self._first(bad[self.table.rows]):
            value = column[self.table.rows[row]]
            dims = np.flatnonzero(~np.isfinite(np.ravel(value)))
            shown = f"{np.ravel(value)[dims[0]]} in dimension {some(dims)} of frame {self.frame[row]}"
            severity = "error" if error else "warning"
            self._report("not-finite", e, row, f"`{name}` is not finite", shown, "finite numbers", REWRITE, severity)

    def shape(self, name: str) -> None:
        """Every value has the declared shape."""
        wrong = self.table.misshapen[name]
        for e, row in self._first(wrong[self.table.rows]) if wrong is not None else ():
            expected = f"shape {self.layout.shape(name)} as meta/info.json declares"
            fix = f"correct `shape` in meta/info.json, or {REWRITE}"
            value = f"another number of values in frame {self.frame[row]}"
            self._report("wrong-shape", e, row, f"`{name}` has another shape than declared", value, expected, fix)

    def lacking(self, name: str, files: Int64[np.ndarray, "m"]) -> None:
        """Every data file has a column that the others have."""
        if len(files) == 0 or name in INDEX_COLUMNS:
            return
        for e, row in self._first(np.isin(self.table.file_of_row[self.table.rows], files)):
            fix = f"write the file again with all columns, or {REWRITE}"
            self._report("missing-column", e, row, f"column `{name}` is missing", "not in the file", "a column", fix)

    def _first(self, flags: Bool[np.ndarray, "r"]) -> list[tuple[int, int]]:
        """(episode, ordered row) of the first flagged row of each episode."""
        if not flags.any():
            return []
        at = np.flatnonzero(flags)
        e = np.searchsorted(self.table.starts, at, side="right") - 1
        _, first = np.unique(e, return_index=True)
        return [(int(e[n]), int(at[n])) for n in first]

    def _report(
        self, kind: str, e: int, row: int, what: str, value: str, expected: str, fix: str, severity: Severity = "error"
    ) -> None:
        file = self.layout.relative(self.layout.data_files[int(self.table.file_of_row[self.table.rows[row]])])
        episode = int(self.layout.number[e])
        self.problems.append(Problem(severity, kind, what, value, expected, fix, file=file, episode=episode))
