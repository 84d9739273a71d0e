"""Normalisation statistics from a data set's tables alone, equal to openpi's, in openpi's norm_stats.json.

Mean, deviation and the 1 % and 99 % quantiles of `state` and of every step of `actions` chunks, after the robot's
inputs and deltas and before padding; streamed in the recipe's batches, unshuffled, the last partial batch left out
(openpi scripts/compute_norm_stats.py, shared/normalize.py). No frame is decoded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from piston.config.schema import RunConfig
from piston.data.lerobot import open_dataset
from piston.data.norm import (
    KeyStats,
    NormStats,
    check_norm_stats,
    load_for_run,
    load_norm_stats,
    norm_stats_path,
    normalize,
    save_norm_stats,
    unnormalize,
)
from piston.data.units import robot_inputs

__all__ = [
    "KeyStats",
    "NormStats",
    "RunningStats",
    "check_norm_stats",
    "compute_norm_stats",
    "load_for_run",
    "load_norm_stats",
    "norm_stats_path",
    "normalize",
    "running_stats",
    "save_norm_stats",
    "stats_command",
    "unnormalize",
]

BINS = 5000
QUANTILES = (0.01, 0.99)
KEYS = ("state", "actions")
EXTREME = 30.0  # a normalised value this large is reported: training on it diverges


@runtime_checkable
class Tables(Protocol):
    """What statistics need of a data set (`lerobot.Dataset` has it)."""

    @property
    def num_frames(self) -> int: ...
    @property
    def episode_index(self) -> Int64[np.ndarray, "episodes"]: ...
    @property
    def episode_starts(self) -> Int64[np.ndarray, "episodes_and_one"]: ...
    def column(self, key: str) -> np.ndarray: ...


# --- openpi's running statistics -------------------------------------------------------------------------------------


class RunningStats:
    """Statistics of a stream of batches, with openpi's arithmetic and its histogram's peculiarities.

    The first batch fixes 5000 equal bins per dimension. When any dimension's range grows, every dimension's counts move
    to new bins, each count to the bin that holds the *left edge* of its old bin; counts whose left edge lies outside
    the new range are lost. Because the first edge lies 1e-10 below the first batch's minimum, the first such move loses
    everything at a minimum that did not drop. A quantile is the left edge of the first bin where the cumulated count
    reaches its share of the true number of samples.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pending: list[np.ndarray] = []  # batches not yet counted: bins change rarely, so many at once

    def update(self, batch: Float[np.ndarray, "*batch d"]) -> None:
        """Takes in one batch; all but the last axis are samples. The batch's dtype is that of the means."""
        flat = batch.reshape(-1, batch.shape[-1])
        minimum, maximum = flat.min(axis=0), flat.max(axis=0)
        mean, mean_of_squares = flat.mean(axis=0), (flat**2).mean(axis=0)
        if self.count == 0:
            self.minimum, self.maximum = minimum, maximum
            self._mean, self._mean_of_squares = mean.copy(), mean_of_squares.copy()
            # in float64, or a float32 minimum would swallow the 1e-10
            self._edges = _edges(minimum.astype(np.float64) - 1e-10, maximum.astype(np.float64) + 1e-10)
            self._histograms = np.zeros((flat.shape[1], BINS))
        elif len(mean) != len(self._mean):
            raise ValueError(
                f"a batch has {len(mean)} dimensions, the ones before had {len(self._mean)}; expected the same for "
                "every episode: `piston data check` finds the episode that differs"
            )
        elif (minimum < self.minimum).any() or (maximum > self.maximum).any():
            self._count_pending()
            self.minimum, self.maximum = np.minimum(self.minimum, minimum), np.maximum(self.maximum, maximum)
            self._move_counts()
        self.count += len(flat)
        share = len(flat) / self.count
        self._mean += (mean - self._mean) * share
        self._mean_of_squares += (mean_of_squares - self._mean_of_squares) * share
        self._pending.append(flat)
        if sum(map(len, self._pending)) >= 1 << 16:
            self._count_pending()

    def _count_pending(self) -> None:
        if self._pending:
            columns = np.concatenate(self._pending).T
            self._histograms += [np.histogram(x, bins=e)[0] for x, e in zip(columns, self._edges, strict=True)]
            self._pending = []

    def _move_counts(self) -> None:
        old_left = self._edges[:, :-1]
        self._edges = _edges(self.minimum.astype(np.float64), self.maximum.astype(np.float64))
        moved = zip(old_left, self._edges, self._histograms, strict=True)
        self._histograms = np.stack([np.histogram(left, bins=e, weights=counts)[0] for left, e, counts in moved])

    def statistics(self) -> KeyStats:
        """What has been taken in so far. Raises ValueError for fewer than two samples."""
        if self.count < 2:
            raise ValueError(
                f"statistics of {self.count} samples; expected at least 2: the data set is too small for its batch size"
            )
        self._count_pending()
        variance = np.maximum(0, self._mean_of_squares - self._mean**2)
        q01, q99 = (self._quantile(q) for q in QUANTILES)
        return KeyStats(self._mean.astype(np.float64), np.sqrt(variance).astype(np.float64), q01, q99)

    def _quantile(self, q: float) -> Float[np.ndarray, "d"]:
        cumulated = np.cumsum(self._histograms, axis=1)
        bins = [
            np.searchsorted(counts, q * self.count) for counts in cumulated
        ]  # BINS, the last edge, if many were lost
        return self._edges[np.arange(len(bins)), bins]


def _edges(low: Float[np.ndarray, "d"], high: Float[np.ndarray, "d"]) -> Float[np.ndarray, "d edges"]:
    return np.stack([np.linspace(a, b, BINS + 1) for a, b in zip(low, high, strict=True)])


# --- over a data set -------------------------------------------------------------------------------------------------


def running_stats(
    ds: Tables,
    run: RunConfig,
    *,
    batch_size: int,
    max_frames: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, RunningStats]:
    """Takes in the data set's states and action chunks, in openpi's batches (openpi scripts/compute_norm_stats.py).

    `max_frames` below the number of frames takes that many at random, the same ones as openpi. `progress(done, total)`
    counts frames. Raises ValueError for columns of the wrong width, NaN, and fewer frames than one batch.
    """
    if max_frames is not None and max_frames < 1:
        raise ValueError(
            f"max_frames is {max_frames}; expected 1 or more, or none for all frames: correct --max-frames"
        )
    state, action = _columns(ds, run)
    ends = np.repeat(ds.episode_starts[1:], np.diff(ds.episode_starts))
    total = ds.num_frames if max_frames is None else min(max_frames, ds.num_frames)
    if total < batch_size:
        raise ValueError(
            f"statistics would be of {total} frames, the batch size is {batch_size}; expected at least one full batch, "
            "as openpi leaves out the last partial one: pass a smaller batch size (--train.batch-size) or more frames"
        )
    rows = _shuffled(ds.num_frames) if total < ds.num_frames else np.arange(ds.num_frames)
    steps = np.arange(run.model.action_horizon)
    running = {key: RunningStats() for key in KEYS}
    whole = total - total % batch_size
    for start in range(0, whole, batch_size):
        rows_B = rows[start : start + batch_size]
        chunk_BA = np.minimum(
            rows_B[:, None] + steps, ends[rows_B, None] - 1
        )  # past its end: the episode's last action
        state_BS, actions_BAD = robot_inputs(run.data.robot, state[rows_B], action[chunk_BA])
        assert actions_BAD is not None
        running["state"].update(state_BS.astype(np.float32))  # openpi's batches are float32 arrays of JAX
        running["actions"].update(actions_BAD.astype(np.float32))
        if progress is not None:
            progress(start + batch_size, whole)
    return running


def compute_norm_stats(
    ds: Tables,
    run: RunConfig,
    *,
    batch_size: int,
    max_frames: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NormStats:
    """Statistics of `state` and `actions`, as `running_stats` collects them."""
    running = running_stats(ds, run, batch_size=batch_size, max_frames=max_frames, progress=progress)
    return {key: stats.statistics() for key, stats in running.items()}


def _columns(ds: Tables, run: RunConfig) -> tuple[Float[np.ndarray, "n s"], Float[np.ndarray, "n d"]]:
    """The robot's state and action, float32, checked."""
    robot = run.data.robot
    flat = {key: ds.column(key).reshape(ds.num_frames, -1) for key in (*robot.state_keys, robot.action_key)}
    state = np.concatenate([flat[key] for key in robot.state_keys], axis=1).astype(np.float32)
    action = flat[robot.action_key].astype(np.float32)
    for name, array, width in (("state", state, robot.state_dim), ("action", action, robot.action_dim)):
        keys = list(robot.state_keys) if name == "state" else [robot.action_key]
        if array.shape[1] != width:
            raise ValueError(
                f"columns {keys} have {array.shape[1]} numbers per frame, robot {robot.name} expects {name}_dim "
                f"{width}; choose a recipe whose robot recorded the data set, or describe it in config/robots.py"
            )
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            row, dimension = (int(i) for i in bad[0])
            episode = int(np.searchsorted(ds.episode_starts, row, side="right")) - 1
            raise ValueError(
                f"columns {keys} hold NaN or infinity in {len(np.unique(bad[:, 0]))} frames; expected finite numbers. "
                f"The first is dimension {dimension} in frame {row - int(ds.episode_starts[episode])} of episode "
                f"{int(ds.episode_index[episode])}; `piston data check` lists the episodes, --data.bad-episodes skip "
                "leaves them out"
            )
    return state, action


def _shuffled(count: int) -> Int64[np.ndarray, "n"]:
    """The order in which openpi's shuffled loader visits frames: torch's, seed 0, after one draw for its workers."""
    generator = torch.Generator().manual_seed(0)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return torch.randperm(count, generator=generator).numpy()


# --- `piston data stats` ---------------------------------------------------------------------------------------------


def stats_command(root: Path, run: RunConfig, out: Path | None, max_frames: int | None, console: Console) -> int:
    """Computes a data set's statistics for a run, prints them per dimension with warnings, and saves them.

    `out` None saves where the run will look for them. The data set's videos are not opened. Returns exit code 0.
    """
    robot = run.data.robot
    ds = open_dataset(
        root,
        tolerance_s=run.data.tolerance_s,
        bad_episodes=run.data.bad_episodes,
        check_videos=False,
        columns=(*robot.state_keys, robot.action_key),
        cameras=(),
    )
    look = (TextColumn("statistics"), BarColumn(), MofNCompleteColumn(), TextColumn("frames"), TimeRemainingColumn())
    with Progress(*look, console=console, transient=True) as bar:
        task = bar.add_task("statistics", total=ds.num_frames)
        running = running_stats(
            ds,
            run,
            batch_size=run.train.batch_size,
            max_frames=max_frames,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for key, stats in running.items():
        console.print(stats_table(key, stats, use_quantiles=run.data.use_quantile_norm))
        for finding in findings(key, stats, use_quantiles=run.data.use_quantile_norm):
            console.print(f"[yellow]warning:[/] {escape(finding)}", highlight=False)
    path = out or norm_stats_path(run)
    save_norm_stats(path, {key: stats.statistics() for key, stats in running.items()})
    console.print(
        f"{running['state'].count} of {ds.num_frames} frames, in batches of {run.train.batch_size}, "
        f"{run.model.action_horizon} action steps each; robot {robot.name}, deltas {robot.delta_mask or 'none'}, "
        f"{'quantile' if run.data.use_quantile_norm else 'z-score'} normalisation; saved {path}",
        highlight=False,
        markup=False,
    )
    return 0


def extremes(stats: RunningStats, *, use_quantiles: bool) -> Float[np.ndarray, "d"]:
    """The largest magnitude that each dimension of this data set has after normalisation."""
    found = stats.statistics()
    ends = np.stack((stats.minimum, stats.maximum)).astype(np.float64)
    return np.abs(normalize(ends, found, use_quantiles=use_quantiles)).max(axis=0)


def findings(key: str, stats: RunningStats, *, use_quantiles: bool) -> list[str]:
    """What makes training or serving with these statistics go wrong, one sentence per dimension."""
    found = stats.statistics()
    lines = []
    for dim, extreme in enumerate(extremes(stats, use_quantiles=use_quantiles)):
        low, high = float(stats.minimum[dim]), float(stats.maximum[dim])
        if low == high:
            lines.append(
                f"{key}[{dim}] is constant ({low:.6g}): any other value at serving time normalises to a huge number"
            )
        elif extreme > EXTREME:
            spread = (
                f"q01 {found.quantiles()[0][dim]:.6g} ≈ q99 {found.quantiles()[1][dim]:.6g}"
                if use_quantiles
                else f"std is {found.std[dim]:.6g}"
            )
            lines.append(
                f"{key}[{dim}] normalises up to {extreme:.4g}, since {spread} but values go from {low:.6g} to "
                f"{high:.6g}: the loss will explode. Is the dimension used? Are deltas taken of deltas?"
            )
    return lines


def stats_table(key: str, stats: RunningStats, *, use_quantiles: bool) -> Table:
    """One row per dimension."""
    found = stats.statistics()
    q01, q99 = found.quantiles()
    table = Table(title=key, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("dim", "mean", "std", "q01", "q99", "min", "max", "scaled\nup to"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = extremes(stats, use_quantiles=use_quantiles)
    numbers = (found.mean, found.std, q01, q99, stats.minimum, stats.maximum, largest)
    for dim, row in enumerate(zip(*numbers, strict=True)):
        table.add_row(str(dim), *(f"{number:.4g}" for number in row))
    return table
