"""Opens a LeRobot v2.0, v2.1 or v3.0 directory as one episode index: the only file that knows the versions apart.

    ds = open_dataset(Path("…/my_data"))          # raises BadDataset (a ValueError) listing everything that is wrong
    ds.column("action"), ds.images("observation.images.top", rows), ds.task(row), ds.chunk_rows(row, horizon)

Paths come from the `data_path` and `video_path` templates of meta/info.json alone. In v3.0 rows are found by their own
`episode_index`: the file that the metadata names for an episode only decides between copies. Timestamps are checked
once, here, and become frame numbers: `round(from_timestamp · fps) + frame_index` (v3.0) or `frame_index` (v2.x).
"""

import dataclasses
import difflib
import glob
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from piston.data.contents import check_contents
from piston.data.dataset import Dataset
from piston.data.episodes import checked_columns, find_episodes
from piston.data.layout import INDEX_COLUMNS, Layout, Placement, is_depth
from piston.data.meta import json_lines, read_tasks
from piston.data.problems import BadDataset, Problem, Severity, file_fault
from piston.data.tables import TableFault, read_parts, read_table
from piston.data.tracks import place_videos

__all__ = ["Dataset", "Inspection", "inspect_dataset", "open_dataset", "read_layout"]

logger = logging.getLogger(__name__)

VERSIONS = ("v2.0", "v2.1", "v3.0")
_LOGGED = 100  # problems written to the log


def open_dataset(
    root: Path,
    *,
    tolerance_s: float = 1e-4,
    bad_episodes: Literal["fail", "skip"] = "fail",
    check_videos: bool = True,
    columns: Sequence[str] | None = None,
    cameras: Sequence[str] | None = None,
) -> Dataset:
    """The data set at `root`, its good episodes contiguous from row 0 on.

    `tolerance_s`: largest distance, in seconds, of a row's timestamp or a video frame's time from the grid k/fps.
    `bad_episodes`: "fail" raises BadDataset listing every problem; "skip" leaves those episodes out and logs it.
    `check_videos`: demux every video once and compare its frames with the rows; off, a fault shows when a frame is
    read. `columns`, `cameras`: the ones that will be used; only they are checked and kept in memory. None: all there
    are. Other columns stay readable; other cameras are not in `image_keys`.
    """
    found = inspect_dataset(root, tolerance_s=tolerance_s, check_videos=check_videos, columns=columns, cameras=cameras)
    errors = [problem for problem in found.problems if problem.severity == "error"]
    if found.dataset is None or (errors and bad_episodes == "fail"):
        hint = "To train on the other episodes alone, set bad_episodes=skip (--data.bad-episodes skip)."
        raise BadDataset(root, errors, hint if found.dataset else "")
    for problem in found.problems[:_LOGGED]:
        logger.warning("%s: %s", root, problem)
    if len(found.problems) > _LOGGED:
        more = len(found.problems) - _LOGGED
        logger.warning("%s: … and %d more: `piston data check` lists them all", root, more)
    if found.left_out:
        count = found.dataset.num_episodes + len(found.left_out)
        logger.warning("%s: left out %d of %d episodes: %s", root, len(found.left_out), count, list(found.left_out))
    return found.dataset


@dataclass(frozen=True)
class Inspection:
    """A data set and everything that is wrong with it; `dataset` holds the good episodes (None: there are none)."""

    layout: Layout
    dataset: Dataset | None
    problems: tuple[Problem, ...]
    left_out: tuple[int, ...]  # episodes with errors


def inspect_dataset(
    root: Path,
    *,
    tolerance_s: float = 1e-4,
    check_videos: bool = True,
    columns: Sequence[str] | None = None,
    cameras: Sequence[str] | None = None,
) -> Inspection:
    """What `open_dataset` knows before it decides. Raises BadDataset only where there is no data set to speak of."""
    layout = read_layout(Path(root), cameras)
    wanted = dict.fromkeys((*INDEX_COLUMNS, *(checked_columns(layout) if columns is None else columns)))
    parts = read_parts(layout.data_files, {key: layout.shape(key) for key in wanted})
    required = tuple(columns or ())
    table = find_episodes(layout, parts, tuple(wanted), required)
    contents = check_contents(layout, table, tolerance_s, required)
    tracks, indexes, found = place_videos(layout, table, tolerance_s, check_videos)
    problems = (*layout.problems, *table.problems, *contents, *found)
    bad = {problem.episode for problem in problems if problem.severity == "error" and problem.episode is not None}
    good = np.flatnonzero(~np.isin(layout.number, np.array(sorted(bad), np.int64)) & (table.lengths > 0))
    if len(layout.number) == 0 and not any(problem.severity == "error" for problem in problems):
        problems = (*problems, _no_episodes(layout.root))
    dataset = Dataset.build(layout, table, tracks, indexes, good, problems) if len(good) else None
    return Inspection(layout, dataset, problems, tuple(sorted(bad)))


def _no_episodes(root: Path) -> Problem:
    fix = "download it again; it may hold only metadata"
    return Problem("error", "no-episodes", "data set has no episodes", "0", "at least 1", fix, file=str(root))


def read_layout(root: Path, cameras: Sequence[str] | None = None) -> Layout:
    """The metadata of a data set of any version. Raises BadDataset if it is none, or none that can be read."""
    info = _read_info(root)
    version = _version(root, info)
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or fps <= 0:
        raise _refused(root, "fps", "frame rate is not a number", repr(fps), "frames per second > 0", "correct `fps`")
    features = _features(root, info)
    problems: list[Problem] = []
    image_features = _cameras(root, features, cameras, problems)
    video_keys = [key for key in image_features if features[key]["dtype"] == "video"]
    if video_keys and not info.get("video_path"):
        fix = "the camera is not used; restore `video_path` if there are videos"
        what, value, expected = "video camera without `video_path`", repr(info.get("video_path")), "a path template"
        problems += [_about_camera("warning", "no-video-path", what, value, expected, fix, key) for key in video_keys]
        image_features, video_keys = [key for key in image_features if key not in video_keys], []
    read = _episodes_v3 if version == "v3.0" else _episodes_v2
    episodes = read(root, info, video_keys, problems)
    for key in video_keys:
        if key not in episodes.videos:
            image_features.remove(key)
            fix = "the camera is not used; remove the feature, or restore its videos"
            what, value, expected = (
                "camera has no place in any episode's metadata",
                "no columns",
                f"columns videos/{key}/…",
            )
            problems.append(_about_camera("warning", "no-video-columns", what, value, expected, fix, key))
    return Layout(
        root=root,
        version=version,
        info=info,
        fps=float(fps),
        features=features,
        tasks=read_tasks(root, version, problems),
        number=np.array(episodes.number, np.int64),
        length=np.array(episodes.length, np.int64),
        episode_tasks=tuple(episodes.tasks),
        data_files=tuple(episodes.data_files),
        file_episode=None if version == "v3.0" else np.array(episodes.number, np.int64),
        pointed_file=np.array(episodes.pointed_file, np.int64),
        videos=episodes.videos,
        image_features=tuple(image_features),
        problems=problems,
    )


def _refused(
    root: Path, kind: str, what: str, value: str, expected: str, fix: str, file: str = "meta/info.json"
) -> BadDataset:
    return BadDataset(root, [Problem("error", kind, what, value, expected, fix, file=file)])


def _about_camera(
    severity: Severity, kind: str, what: str, value: str, expected: str, fix: str, camera: str
) -> Problem:
    return Problem(severity, kind, what, value, expected, fix, file="meta/info.json", camera=camera)


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta" / "info.json"
    fault = file_fault(path, "metadata")
    if fault is not None:
        fix = "give the directory that holds meta/, data/ and videos/ of a LeRobot v2.0, v2.1 or v3.0 data set"
        problem = fault.problem(file=str(path))
        raise BadDataset(root, [dataclasses.replace(problem, fix=fix) if fault.kind == "missing-metadata" else problem])
    try:
        info = json.loads(path.read_text("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _refused(root, "bad-json", "info.json is not JSON", str(error), "JSON", "download it again") from error
    if not isinstance(info, dict):
        raise _refused(
            root, "bad-json", "info.json is no object", type(info).__name__, "an object", "download it again"
        )
    return info


def _version(root: Path, info: dict[str, Any]) -> str:
    storage = info.get("storage_format", "parquet")
    if storage != "parquet":
        what, fix = "storage format is not supported", "export the data set as LeRobot v3.0 with parquet and mp4 files"
        raise _refused(root, "storage-format", what, repr(storage), "parquet files and videos", fix)
    said = info.get("codebase_version")
    version = "v" + str(said).removeprefix("v")
    if version in VERSIONS:
        return version
    fix = "convert it with LeRobot's own converters"
    if re.match(r"v[01]\.", version):
        fix = "convert it to v2.0 or later with the converters of LeRobot 0.3"
    elif re.match(r"v\d", version):
        fix = "it is newer than this reader: write it as v3.0, or update piston"
    raise _refused(root, "version", "data set version is not supported", repr(said), ", ".join(VERSIONS), fix)


def _features(root: Path, info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    features = info.get("features")
    if not isinstance(features, dict) or not features:
        fix = "download it again"
        raise _refused(
            root, "features", "info.json describes no features", repr(features), "an object of features", fix
        )
    for key, feature in features.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            fix = "correct the entry"
            raise _refused(
                root, "features", f"feature `{key}` has no dtype", repr(feature), "dtype, shape and names", fix
            )
    return features


def _cameras(
    root: Path, features: dict[str, dict[str, Any]], wanted: Sequence[str] | None, problems: list[Problem]
) -> list[str]:
    """Image and video features, without depth maps; only the wanted ones."""
    every = [key for key, feature in features.items() if feature["dtype"] in ("image", "video")]
    depth = [key for key in every if is_depth(features[key])]
    usable = [key for key in every if key not in depth]
    what, fix = "camera is a depth map", "π0 and π0.5 see colour images: map another camera"
    problems += [
        _about_camera("warning", "depth", what, "is_depth_map", "a colour camera", "it is not used", key)
        for key in depth
        if wanted is None
    ]
    for key in wanted or ():
        if key in depth:
            raise BadDataset(
                root, [_about_camera("error", "depth", what, "is_depth_map", f"one of {usable}", fix, key)]
            )
        if key not in usable:
            near = difflib.get_close_matches(key, usable, n=1)
            fix = (f"did you mean `{near[0]}`? " if near else "") + "correct the robot's key map"
            raise _refused(root, "missing-camera", "data set has no such camera", f"`{key}`", f"one of {usable}", fix)
    return [key for key in usable if wanted is None or key in wanted]


@dataclass
class _Episodes:
    """What the metadata say of the episodes, sorted by number."""

    number: list[int]
    length: list[int]
    tasks: list[tuple[str, ...]]
    data_files: list[Path]
    pointed_file: list[int]
    videos: dict[str, Placement]


def _once(rows: list[dict[str, Any]], file: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """One row per episode number (the last), sorted by it."""
    by_number = {int(row["episode_index"]): row for row in rows}
    if len(by_number) < len(rows):
        value, expected = f"{len(rows) - len(by_number)} repetitions", "one entry per episode"
        what, fix = (
            "episodes are listed more than once",
            "the last entry counts; recording was resumed or sets were merged",
        )
        problems.append(Problem("warning", "repeated-episodes", what, value, expected, fix, file=file))
    return [by_number[number] for number in sorted(by_number)]


def _episodes_v2(root: Path, info: dict[str, Any], video_keys: Sequence[str], problems: list[Problem]) -> _Episodes:
    """v2.0 and v2.1: meta/episodes.jsonl, one table and one video per camera and episode."""
    path = root / "meta" / "episodes.jsonl"
    rows = _once(json_lines(path, ("episode_index",), problems), "meta/episodes.jsonl", problems)
    chunk = info.get("chunks_size", 1000)
    if not isinstance(chunk, int) or chunk < 1:
        fix = "correct it; LeRobot writes 1000"
        raise _refused(root, "chunks-size", "`chunks_size` is no number of episodes", repr(chunk), "at least 1", fix)
    number = [int(row["episode_index"]) for row in rows]

    def files(template: str, **names: str) -> list[Path]:
        data = (_fill(root, info, template, episode_chunk=n // chunk, episode_index=n, **names) for n in number)
        return [root / name for name in data]

    nowhere, zeros = np.full(len(rows), np.nan), np.zeros(len(rows))
    order = np.arange(len(rows))
    return _Episodes(
        number=number,
        length=[int(row.get("length", -1)) for row in rows],
        tasks=[_texts(row.get("tasks")) for row in rows],
        data_files=files("data_path"),
        pointed_file=order.tolist(),
        videos={key: Placement(tuple(files("video_path", video_key=key)), order, zeros, nowhere) for key in video_keys},
    )


def _episodes_v3(root: Path, info: dict[str, Any], video_keys: Sequence[str], problems: list[Problem]) -> _Episodes:
    """v3.0: meta/episodes/*/*.parquet, tables and videos of many episodes; all data files of the template's form."""
    rows: list[dict[str, Any]] = []
    shards = sorted((root / "meta" / "episodes").glob("**/*.parquet"))
    if not shards:
        fix = "download it again; a recorder that was stopped may not have written it: record again or recover it"
        file = "meta/episodes"
        raise _refused(
            root, "missing-episodes", "table of episodes is missing", "no file", "*/*.parquet", fix, file=file
        )
    for shard in shards:
        try:
            table, _, _ = read_table(shard, lambda name: not name.startswith("stats/"))
        except TableFault as error:
            problems.append(error.fault.problem(file=str(shard.relative_to(root))))
            continue
        if table.num_rows and "episode_index" not in table.column_names:
            what, fix = "table of episodes has no column `episode_index`", "download it again, or write it again"
            value, file = f"columns {sorted(table.column_names)}", str(shard.relative_to(root))
            problems.append(Problem("error", "missing-column", what, value, "`episode_index`", fix, file=file))
        rows += [row for row in table.to_pylist() if row.get("episode_index") is not None]
    rows = _once(rows, "meta/episodes", problems)
    data_files = _existing(root, info, "data_path")
    if not data_files:
        fix = "download data/ too; a conversion that failed leaves none"
        file = str(info.get("data_path"))
        raise _refused(root, "missing-table", "data set has no data files", "no file", "parquet files", fix, file=file)
    place = {path: n for n, path in enumerate(data_files)}

    def pointed(row: dict[str, Any], prefix: str, template: str, **names: str) -> Path | None:
        chunk, file = row.get(f"{prefix}/chunk_index"), row.get(f"{prefix}/file_index")
        if chunk is None or file is None:
            return None
        return root / _fill(root, info, template, chunk_index=int(chunk), file_index=int(file), **names)

    def placement(key: str) -> Placement:
        paths = [pointed(row, f"videos/{key}", "video_path", video_key=key) for row in rows]
        files = tuple(sorted({path for path in paths if path is not None}))
        number = {path: n for n, path in enumerate(files)}
        file = np.array([-1 if path is None else number[path] for path in paths], np.int64)
        start, end = (
            np.array([_seconds(row.get(f"videos/{key}/{name}_timestamp")) for row in rows], float)
            for name in ("from", "to")
        )
        return Placement(files, file, start, end)

    placements = {key: placement(key) for key in video_keys}
    files_said = [pointed(row, "data", "data_path") for row in rows]
    return _Episodes(
        number=[int(row["episode_index"]) for row in rows],
        length=[_length(row) for row in rows],
        tasks=[_texts(row.get("tasks")) for row in rows],
        data_files=data_files,
        pointed_file=[-1 if path is None else place.get(path, -1) for path in files_said],
        videos={key: value for key, value in placements.items() if value.files},
    )


def _seconds(value: Any) -> float:
    return math.nan if value is None else float(value)


def _length(row: dict[str, Any]) -> int:
    if row.get("length") is not None:
        return int(row["length"])
    first, end = row.get("dataset_from_index"), row.get("dataset_to_index")
    return -1 if first is None or end is None else int(end) - int(first)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in ([value] if isinstance(value, str) else value or ()))


def _template(root: Path, info: dict[str, Any], name: str) -> str:
    template = info.get(name)
    if not isinstance(template, str) or not template:
        fix = "restore it from the original data set"
        raise _refused(root, "template", f"info.json has no `{name}`", repr(template), "a path template", fix)
    return template


def _fill(root: Path, info: dict[str, Any], name: str, **values: int | str) -> str:
    template = _template(root, info, name)
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        expected = f"only {', '.join('{' + key + '}' for key in values)}"
        what, value, fix = f"`{name}` cannot be filled in", f"{template!r} ({error})", "correct the template"
        raise _refused(root, "template", what, value, expected, fix) from error


def _existing(root: Path, info: dict[str, Any], name: str) -> list[Path]:
    """All files of a template's form, in the order of the numbers in their names."""
    pieces = re.split(r"(\{[^{}]*\})", _template(root, info, name))
    pattern = "".join("*" if piece.startswith("{") else glob.escape(piece) for piece in pieces)
    form = re.compile("".join(r"(\d+)" if piece.startswith("{") else re.escape(piece) for piece in pieces))
    matches = ((form.fullmatch(path.relative_to(root).as_posix()), path) for path in root.glob(pattern))
    return [path for _, path in sorted((tuple(map(int, match.groups())), path) for match, path in matches if match)]
