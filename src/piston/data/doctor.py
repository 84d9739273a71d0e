"""What is wrong with a data set, found before it costs a run: `piston data check` and `piston data info`.

Errors are what `open_dataset` refuses. Warnings and notes are judgements on its contents: values that normalise badly,
actions that are deltas already, frozen cameras, spare frames, orphan files, missing statistics, slow videos.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from piston.config.schema import RunConfig
from piston.data.dataset import Dataset
from piston.data.episodes import as_integers, some
from piston.data.info import human, info, render_info
from piston.data.layout import INDEX_COLUMNS, Layout
from piston.data.lerobot import inspect_dataset
from piston.data.problems import BadDataset, Problem
from piston.data.signals import signals
from piston.data.tables import TableFault, open_table
from piston.data.units import delta_dims
from piston.data.video import VideoFault, VideoIndex

_SAMPLED_ROWS = 200_000  # rows from which values are judged
_SAMPLED_EPISODES, _SAMPLED_FRAMES = 3, 12  # episodes and consecutive frames decoded per camera
_EXTREME = 20.0  # normalised values beyond ± this are worth a look
_LONG_GOP = 60  # frames between keyframes from which random reads are slow
_LARGE_GROUP = 64 << 20  # bytes of images in one row group from which random reads are slow
_STATE_KEYS = ("observation.state", "state", "observation.states")
_MODEL_WIDTH = 32  # π0's and π0.5's action_dim


@dataclass(frozen=True)
class Report:
    """What a check found, errors first."""

    root: str
    horizon: int
    findings: tuple[Problem, ...]

    def count(self, severity: str) -> int:
        """Findings of one severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def ok(self) -> bool:
        """No errors."""
        return self.count("error") == 0

    def to_json(self) -> dict[str, Any]:
        """Nested dictionaries and lists."""
        counts = {severity: self.count(severity) for severity in ("error", "warning", "note")}
        return {"root": self.root, "horizon": self.horizon, "ok": self.ok, "counts": counts} | {
            "findings": [finding.to_json() for finding in self.findings]
        }


def check(root: Path, *, horizon: int = 50, decode: bool = True, run: RunConfig | None = None) -> Report:
    """Everything that can be known before a run. `horizon`: action steps per sample; `decode`: look at a few frames.

    `run`: judge for this recipe: its deltas and its token budget. Raises ValueError for a horizon below 1.
    """
    if horizon < 1:
        raise ValueError(f"--horizon is {horizon}, expected 1 or more action steps: give the recipe's action horizon")
    try:
        inspection = inspect_dataset(root)
    except BadDataset as error:
        return Report(str(root), horizon, error.problems)
    layout, ds = inspection.layout, inspection.dataset
    found = [*inspection.problems, *_totals(layout), *_files(layout), *_statistics(layout)]
    if ds is not None:
        found += [*_tasks(ds), *_values(ds), *_actions(ds, run), *signals(ds, run), *_padding(ds, horizon)]
        found += [*_rates(ds), *_spare_frames(ds), *_starts(ds), *_access(ds), *(_pictures(ds) if decode else ())]
    order = {"error": 0, "warning": 1, "note": 2}
    return Report(str(root), horizon, tuple(sorted(found, key=lambda problem: order[problem.severity])))


# ── metadata and files ───────────────────────────────────────────────────────────────────────────────────────────────


def _totals(layout: Layout) -> Iterator[Problem]:
    """info.json's totals against the episodes listed."""
    stated = np.maximum(layout.length, 0)
    for name, value in (("total_episodes", len(layout.number)), ("total_frames", int(stated.sum()))):
        said = layout.info.get(name)
        if isinstance(said, int) and said != value and (name == "total_episodes" or (layout.length >= 0).all()):
            what, fix = f"`{name}` differs from the list of episodes", "nothing to do: the list is used"
            yield Problem("warning", "totals", what, str(said), str(value), fix, file="meta/info.json")


def _files(layout: Layout) -> Iterator[Problem]:
    """Files that nothing refers to, and what interrupted recordings leave."""
    used = {*layout.data_files, *(path for place in layout.videos.values() for path in place.files)}
    for folder, pattern, noun in (("data", "*.parquet", "tables"), ("videos", "*.mp4", "videos")):
        cameras = {key for key, feature in layout.features.items() if feature["dtype"] == "video"} - {*layout.videos}
        orphans = sorted(
            path
            for path in (layout.root / folder).rglob(pattern)
            if path not in used and not cameras & {*path.relative_to(layout.root).parts}
        )
        if orphans:
            size = human(sum(path.stat().st_size for path in orphans))
            what, fix = (
                f"{noun} that no episode refers to",
                "they are not used: delete them if the episodes are complete",
            )
            names = some(np.array([layout.relative(path) for path in orphans], object), 3)
            yield Problem("warning", "orphan-files", what, f"{len(orphans)} files, {size}: {names}", "none", fix)
    staged = layout.root / "images"
    if staged.is_dir() and any(staged.rglob("*.*")):
        what, fix = "an interrupted recording left its single frames", "they are not used: delete the folder"
        yield Problem("note", "staging-images", what, "folder images/", "none", fix, file="images")


def _tasks(ds: Dataset) -> Iterator[Problem]:
    """Task texts that say nothing, or that nobody performs."""
    empty = [index for index, text in ds.tasks.items() if not text.strip()]
    if empty:
        what, fix = "task text is empty", "write what the robot does, or set data.default_prompt"
        yield Problem(
            "warning", "empty-task", what, f"task {some(np.array(empty))}", "a sentence", fix, file="meta/tasks"
        )
    if "task_index" in ds.columns:
        unused = sorted({*ds.tasks} - {*as_integers(ds.column("task_index")).tolist()})
        if unused:
            what, fix = "tasks without frames", "nothing to do"
            yield Problem("note", "unused-task", what, some(np.array(unused)), "frames of every task", fix)


def _statistics(layout: Layout) -> Iterator[Problem]:
    """Whether the data set's own statistics could serve (π0.5 needs quantiles); they are never used in any case."""
    path = layout.root / "meta" / ("episodes_stats.jsonl" if layout.version == "v2.1" else "stats.json")
    lines = path.read_text().splitlines()[:1] if path.suffix == ".jsonl" and path.is_file() else []
    text = lines[0] if lines else path.read_text() if path.is_file() else ""
    if '"q01"' not in text or '"q99"' not in text:
        what = "the data set's own statistics have no quantiles"
        fix = "run `piston data stats`: it computes q01 and q99 from the tables, as π0.5 needs them"
        value = "no q01, q99" if text else "no such file"
        yield Problem("note", "no-quantiles", what, value, "q01 and q99", fix, file=layout.relative(path))


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sample(ds: Dataset, key: str) -> Float64[np.ndarray, "n d"] | None:
    """A column of numbers as [rows, values], at most so many rows; None for other columns."""
    if key not in ds.columns or ds.features[key]["dtype"] in ("image", "video"):
        return None
    try:
        column = ds.column(key)
    except ValueError:
        return None
    if column.dtype.kind != "f" or column.size == 0:
        return None
    step = max(1, len(column) // _SAMPLED_ROWS)
    values = column[::step].reshape(len(column[::step]), -1).astype(np.float64)
    return values if np.isfinite(values).all() else None


def _values(ds: Dataset) -> Iterator[Problem]:
    """Dimensions that do not move, that normalise to huge numbers, or that are more than the model has."""
    for key in ds.features:
        values = None if key in INDEX_COLUMNS or key.startswith("next.") else _sample(ds, key)
        if values is None:
            continue
        low, high = values.min(0), values.max(0)
        q01, q99 = np.quantile(values, 0.01, axis=0), np.quantile(values, 0.99, axis=0)
        still = high - low <= 1e-6 * np.maximum(1.0, np.abs(values.mean(0)))
        if still.any():
            what, fix = f"`{key}` has constant dimensions", "check that the sensor works; leave out what is not wired"
            where = f"dimensions {some(np.flatnonzero(still))} of {len(still)}"
            yield Problem("warning", "constant", what, where, "values that change", fix)
        ends = np.stack([low, high])
        extreme = np.abs(2 * (ends - q01) / (q99 - q01 + 1e-6) - 1).max(0)
        wild = (extreme > _EXTREME) & ~still
        if wild.any():
            worst = int(np.argmax(np.where(wild, extreme, 0)))
            what = f"`{key}` has values far outside its 1 % … 99 % range"
            value = (
                f"dimensions {some(np.flatnonzero(wild))}; normalised up to ±{extreme[worst]:.0f} (dimension {worst}: "
            )
            value += f"{low[worst]:.4g} … {high[worst]:.4g}, q01 {q01[worst]:.4g}, q99 {q99[worst]:.4g})"
            fix = (
                "look for faulty readings; keep a dimension that rarely moves out of the state, or edit its statistics"
            )
            yield Problem("warning", "outliers", what, value, f"normalised values within ±{_EXTREME:g}", fix)
        if values.shape[1] > _MODEL_WIDTH and ("action" in key or "state" in key):
            what, fix = (
                f"`{key}` has more dimensions than π0 and π0.5",
                "map fewer, or train with a larger --model.action-dim",
            )
            yield Problem("warning", "too-wide", what, str(values.shape[1]), f"at most {_MODEL_WIDTH}", fix)


def _first_key(ds: Dataset, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in ds.columns), None)


def _actions(ds: Dataset, run: RunConfig | None) -> Iterator[Problem]:
    """Whether actions are positions (close to the next state) or deltas already (close to its change)."""
    action_key = _first_key(ds, ("action", "actions"))
    state_key = _first_key(ds, _STATE_KEYS)
    if action_key is None or state_key is None:
        return
    action, state = ds.column(action_key), ds.column(state_key)
    if action.ndim != 2 or state.ndim != 2 or action.dtype.kind != "f" or state.dtype.kind != "f":
        return
    inside = np.ones(ds.num_frames, bool)
    inside[ds.episode_starts[1:] - 1] = False  # the last row of an episode has no next state
    rows = np.flatnonzero(inside)
    rows = rows[:: max(1, len(rows) // _SAMPLED_ROWS)]
    width = min(action.shape[1], state.shape[1])
    if len(rows) < 10:
        return
    a, s, then = (x[:, :width].astype(np.float64) for x in (action[rows], state[rows], state[rows + 1]))
    moving = (a.std(0) > 1e-6) & ((then - s).std(0) > 1e-9) & (s.std(0) > 1e-6)
    to_next, to_change = _correlation(a, then), _correlation(a, then - s)
    near = np.abs(a - then).mean(0) < s.std(0)
    absolute = moving & (to_next > 0.8) & near
    delta = moving & ~absolute & (to_change > 0.5) & (to_change > to_next)
    expected = "one kind, known to the recipe"
    if delta.any():
        what = f"`{action_key}` looks like deltas already"
        value = f"dimensions {some(np.flatnonzero(delta), 32)} follow the change of `{state_key}`"
        fix = "use a robot without delta_mask for these dimensions: deltas of deltas train a worse policy"
        yield Problem("warning", "delta-actions", what, value, expected, fix)
        mask = np.zeros(0, bool) if run is None else delta_dims(run.data.robot.delta_mask)
        mask = np.pad(mask[: len(delta)], (0, max(0, len(delta) - len(mask))))
        if run is not None and (mask & delta).any():
            value = f"dimensions {some(np.flatnonzero(mask & delta), 32)}, delta_mask {run.data.robot.delta_mask}"
            what = f"recipe {run.name} takes deltas of deltas"
            yield Problem("error", "double-delta", what, value, "absolute actions there", fix)
    if absolute.any():
        what = f"`{action_key}` looks absolute"
        value = f"dimensions {some(np.flatnonzero(absolute), 32)} follow the next `{state_key}`"
        fix = "a delta_mask on joints (not on grippers) is what π0's recipes use"
        yield Problem("note", "absolute-actions", what, value, expected, fix)


def _correlation(a: Float64[np.ndarray, "n d"], b: Float64[np.ndarray, "n d"]) -> Float64[np.ndarray, "d"]:
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).mean(0) / (a.std(0) * b.std(0) + 1e-12)


def padded_share(lengths: np.ndarray, horizon: int) -> float:
    """Share of the action steps of all chunks that repeat an episode's last action."""
    short = np.minimum(lengths, horizon - 1).astype(np.float64)  # rows whose chunk runs past the end
    padded = short * (horizon - 1) - short * (short - 1) / 2
    return float(padded.sum() / (lengths.sum() * horizon))


def _padding(ds: Dataset, horizon: int) -> Iterator[Problem]:
    share = padded_share(np.diff(ds.episode_starts), horizon)
    what, value = f"action steps that repeat an episode's last action, at horizon {horizon}", f"{share:.1%}"
    fix = "the reference trains on them too; a shorter --model.action-horizon, or longer episodes, makes them fewer"
    yield Problem("warning" if share > 0.4 else "note", "padded-actions", what, value, "below 40 %", fix)


# ── videos and images ────────────────────────────────────────────────────────────────────────────────────────────────


def _indexes(ds: Dataset, files: tuple[Path, ...]) -> dict[Path, VideoIndex]:
    """Indexes of the files that can be read; the others are reported already."""
    indexes = {}
    for path in files:
        with contextlib.suppress(VideoFault):
            indexes[path] = ds.video_index(path)
    return indexes


def _rates(ds: Dataset) -> Iterator[Problem]:
    """Frame rates that cameras declare for themselves."""
    for key in ds.image_keys:
        for details in (ds.features[key].get("info"), ds.features[key].get("video_info")):
            said = details.get("video.fps") if isinstance(details, dict) else None
            if isinstance(said, int | float) and abs(said - ds.fps) > 1e-3 * ds.fps:
                what, fix = "camera declares another frame rate", "nothing to do: the videos' own times were checked"
                file = "meta/info.json"
                yield Problem(
                    "warning", "declared-fps", what, f"video.fps {said:g}", f"{ds.fps:g}", fix, file=file, camera=key
                )


def _spare_frames(ds: Dataset) -> Iterator[Problem]:
    """Videos with frames that belong to no episode."""
    for key in ds.image_keys:
        claimed: dict[Path, int] = {}
        if ds.video_files(key):
            files, file, frame = ds.video_frames(key, ds.episode_starts[1:] - 1)
            for n, last in zip(file.tolist(), frame.tolist(), strict=True):
                claimed[files[n]] = max(claimed.get(files[n], 0), last + 1)
        indexes = _indexes(ds, tuple(claimed))
        spare = {path: index.count - claimed[path] for path, index in indexes.items() if index.count > claimed[path]}
        if spare:
            path = max(spare, key=lambda path: spare[path])
            what = "videos go on after their last episode"
            value = f"{len(spare)} of {len(claimed)} files, up to {spare[path]} frames"
            fix = "the first frames are used; if rows were thinned out, pictures and actions do not match: look at them"
            name = str(path.relative_to(ds.root))
            yield Problem("warning", "spare-frames", what, value, "as many frames as rows", fix, file=name, camera=key)


def _starts(ds: Dataset) -> Iterator[Problem]:
    """Episodes that begin between keyframes, in a set whose episodes begin on one: their offset may be off."""
    for key in ds.image_keys if ds.version == "v3.0" else ():
        if not ds.video_files(key):
            continue
        files, file, frame = ds.video_frames(key, ds.episode_starts[:-1])
        indexes = _indexes(ds, files)
        off = [
            (int(ds.episode_index[e]), int(start), files[int(n)])
            for e, (n, start) in enumerate(zip(file, frame, strict=True))
            if files[int(n)] in indexes and not indexes[files[int(n)]].is_keyframe(int(start))
        ]
        if 0 < len(off) <= max(1, ds.num_episodes // 10):
            for episode, start, path in off:
                what, fix = "episode begins between keyframes", "compare its first pictures with its rows"
                value, name = f"frame {start}", str(path.relative_to(ds.root))
                yield Problem(
                    "warning", "off-keyframe", what, value, "a keyframe, as others do", fix, name, episode, key
                )


def _access(ds: Dataset) -> Iterator[Problem]:
    """Storage that makes reading one frame dear."""
    for key in ds.image_keys:
        gops = [index.longest_gop for index in _indexes(ds, ds.video_files(key)[:20]).values()]
        if gops and max(gops) > _LONG_GOP:
            what, value = "keyframes are far apart", f"up to {max(gops)} frames"
            fix = "reading one frame decodes all since the keyframe: build a frame cache, or encode with g=2"
            yield Problem("note", "long-gop", what, value, f"at most {_LONG_GOP}", fix, camera=key)
    stored = [key for key in ds.image_keys if not ds.video_files(key)]
    for path in ds.data_files if stored else ():
        try:
            with open_table(path) as table:
                groups = [table.metadata.row_group(n).total_byte_size for n in range(table.metadata.num_row_groups)]
        except TableFault:
            continue
        if groups and max(groups) > _LARGE_GROUP:
            what, value = "images are stored in large row groups", human(max(groups))
            fix = "reading one image reads its group: build a frame cache, or write row groups of some 100 rows"
            name = str(path.relative_to(ds.root))
            yield Problem("note", "large-row-groups", what, value, f"at most {human(_LARGE_GROUP)}", fix, file=name)
            return


def _pictures(ds: Dataset) -> Iterator[Problem]:
    """Decodes a few consecutive frames of a few episodes: black, frozen, undecodable?"""
    positions = np.unique(np.linspace(0, ds.num_episodes - 1, _SAMPLED_EPISODES).astype(int))
    state_key = _first_key(ds, _STATE_KEYS)
    for key in ds.image_keys:
        pairs, same, black, seen = 0, 0, 0, 0
        for position in positions:
            rows = ds.rows_of(int(position))
            middle = max(0, (len(rows) - _SAMPLED_FRAMES) // 2)
            rows = rows[middle : middle + _SAMPLED_FRAMES]
            try:
                frames = ds.images(key, rows)
            except ValueError as error:
                what, fix = (
                    "frame cannot be read",
                    "leave the episode out (bad_episodes=skip skips it only if it is found)",
                )
                episode = int(ds.episode_index[position])
                yield Problem("error", "undecodable", what, str(error), "pictures", fix, episode=episode, camera=key)
                continue
            moves = np.ones(len(rows) - 1, bool)
            if state_key is not None:
                moves = (np.diff(ds.column(state_key)[rows].reshape(len(rows), -1), axis=0) != 0).any(axis=1)
            still = np.array([np.array_equal(a, b) for a, b in itertools.pairwise(frames)], bool)
            pairs, same, seen = pairs + int(moves.sum()), same + int((still & moves).sum()), seen + len(frames)
            black += int((frames.reshape(len(frames), -1).max(1) < 16).sum())
        if pairs and same > pairs / 2:
            what, fix = "camera repeats its frames", "it was frozen, or recorded at a lower rate: look at the video"
            value = f"{same} of {pairs} sampled frames equal the one before while the robot moves"
            yield Problem("warning", "frozen", what, value, "pictures that change", fix, camera=key)
        if black:
            what, fix = "camera is black", "check the camera; leave it out of the robot's key map if it is not used"
            yield Problem("warning", "black", what, f"{black} of {seen} sampled frames", "pictures", fix, camera=key)


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def render_report(report: Report) -> RenderableType:
    """A table of findings and the verdict."""
    styles = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    table = Table("", "finding", "what to do", title=f"Check of {report.root}", show_lines=True)
    for finding in report.findings:
        where = f"\n{finding.where}" if finding.where else ""
        text = f"{finding.what}: {finding.value}, expected {finding.expected}{where}"
        table.add_row(Text(finding.severity, style=styles[finding.severity]), Text(text), Text(finding.fix))
    totals = {name: report.count(name) for name in styles}
    counts = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in totals.items())
    verdict = "can be used" if report.ok else "cannot be used as it is (or with bad_episodes=skip only)"
    return Group(table, Text(f"{counts}: the data set {verdict}", style="green" if report.ok else "bold red"))


def info_command(path: Path, as_json: bool, console: Console) -> int:
    """`piston data info PATH [--json]`: prints what the data set holds; 1 if it cannot be opened."""
    _demand(path)
    try:
        found = info(path)
    except BadDataset as error:
        return _failed(error, as_json, console)
    if as_json:
        _print_json(found.to_json(), console)
    else:
        console.print(render_info(found))
    return 0


def check_command(
    path: Path,
    as_json: bool,
    horizon: int,
    console: Console,
    *,
    decode: bool = True,
    run: RunConfig | None = None,
) -> int:
    """`piston data check PATH [--json] [--horizon N]`: prints what is wrong; 1 if there are errors."""
    _demand(path)
    if as_json:
        report = check(path, horizon=horizon, decode=decode, run=run)
        _print_json(report.to_json(), console)
    else:
        with console.status("reading tables, demuxing videos"):
            report = check(path, horizon=horizon, decode=decode, run=run)
        console.print(render_report(report))
    return 0 if report.ok else 1


def _demand(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is no directory; expected a LeRobot data set, which holds meta/: correct the path")


def _failed(error: BadDataset, as_json: bool, console: Console) -> int:
    if as_json:
        _print_json({"ok": False, "findings": [problem.to_json() for problem in error.problems]}, console)
    else:
        console.print(Text(str(error), style="red"))
    return 1


def _print_json(value: dict[str, Any], console: Console) -> None:
    console.print(json.dumps(value, indent=2, ensure_ascii=False), soft_wrap=True, markup=False, highlight=False)
