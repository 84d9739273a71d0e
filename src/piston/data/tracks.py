"""Where every episode's frames lie in its videos: one start frame per episode and camera, verified by demuxing.

`start = round(from_timestamp · fps)`, or, in a file whose frames are not evenly spaced, the frame nearest to that time;
frame i of the episode is frame `start + i` of the file. Verified means: those frames exist, and each is shown at
`from_timestamp + i/fps` within tolerance. Times are compared relative to the file's first frame, or to the container's
zero where the offsets count from there. Where the stated offsets have drifted away from the frames (sums of rounded
durations in a long file) but the episodes' lengths fill the file exactly, in order, the lengths decide, and a warning
says so.
"""

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from piston.data.episodes import EpisodeTable
from piston.data.layout import FPS_DIGITS, Layout, Placement, image_size
from piston.data.problems import Fault, Problem, Severity
from piston.data.video import VideoFault, VideoIndex, index_video

logger = logging.getLogger(__name__)

_DEMUXERS = 8  # threads: they wait for the disk more than they compute
_DRIFT = 2e-3  # largest relative error of an offset that is taken for drift
_FAR = 1e9  # seconds: no video is longer, and its frames can still be counted
_REENCODE = "encode the video again, or leave the episode out (bad_episodes=skip)"


@dataclass(frozen=True)
class Track:
    """One video camera: episode e is in `files[file[e]]` from frame `start[e]` on."""

    files: tuple[Path, ...]
    file: Int64[np.ndarray, "e"]
    start: Int64[np.ndarray, "e"]


def place_videos(
    layout: Layout, table: EpisodeTable, tolerance_s: float, check: bool
) -> tuple[dict[str, Track], dict[str, VideoIndex], list[Problem]]:
    """Tracks by camera, indexes by file name, and what is wrong. Without `check` nothing is opened or found wrong."""
    starts = {key: _stated_start(layout, place) for key, place in layout.videos.items()}
    tracks = {key: Track(place.files, place.file, starts[key]) for key, place in layout.videos.items()}
    if not check:
        return tracks, {}, []
    used = sorted({path for place in layout.videos.values() for path in place.files})
    logger.info("%s: demuxing %d videos", layout.root, len(used))
    with ThreadPoolExecutor(_DEMUXERS) as pool:
        outcomes = dict(zip(used, pool.map(_indexed, used), strict=True))
    indexes = {str(path): found for path, found in outcomes.items() if isinstance(found, VideoIndex)}
    problems: list[Problem] = []
    for key, place in layout.videos.items():
        camera = _Camera(layout, table, key, place, tolerance_s)
        tracks[key] = Track(place.files, place.file, camera.verified(outcomes, starts[key]))
        problems += camera.problems
    return tracks, indexes, problems


def _stated_start(layout: Layout, place: Placement) -> Int64[np.ndarray, "e"]:
    seconds = np.clip(np.nan_to_num(place.start_s), -_FAR, _FAR)
    return np.rint(seconds * layout.fps).astype(np.int64)


def _indexed(path: Path) -> VideoIndex | Fault:
    try:
        return index_video(path)
    except VideoFault as error:
        return error.fault


@dataclass(frozen=True)
class _Deviation:
    """How far the worst frame of an episode is from its time."""

    frame: int  # of the episode
    seconds: float  # > 0: shown late
    tolerable: bool


def _fits(off: _Deviation | None) -> bool:
    return off is not None and off.tolerable


def _nearest(times: Float64[np.ndarray, "k"], wanted: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """Position in ascending `times` of the one nearest to each wanted time."""
    after = np.clip(np.searchsorted(times, wanted), 1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    return np.where(wanted - times[before] <= times[after] - wanted, before, after).astype(np.int64)


class _Camera:
    """Verification of one camera; `problems` collects what is wrong."""

    def __init__(self, layout: Layout, table: EpisodeTable, key: str, place: Placement, tolerance_s: float) -> None:
        self.layout, self.key, self.place, self.tolerance_s = layout, key, place, tolerance_s
        self.lengths = table.lengths
        self.problems: list[Problem] = []

    def verified(
        self, outcomes: dict[Path, VideoIndex | Fault], start: Int64[np.ndarray, "e"]
    ) -> Int64[np.ndarray, "e"]:
        """The start frame of every episode."""
        start = start.copy()
        file = self.place.file
        for e in np.flatnonzero((file < 0) | ~np.isfinite(self.place.start_s)):
            fix = "recorded without this camera, or damaged metadata: leave the episode out (bad_episodes=skip)"
            self._report(
                "no-video-offset", int(e), "episode has no place in a video", "none", "file and offset", fix, None
            )
        order = np.argsort(file, kind="stable")
        bounds = np.searchsorted(file[order], np.arange(len(self.place.files) + 1))
        sizes: dict[tuple[int, int], int] = {}
        for n, path in enumerate(self.place.files):
            episodes = order[bounds[n] : bounds[n + 1]]
            episodes = episodes[np.isfinite(self.place.start_s[episodes]) & (self.lengths[episodes] > 0)]
            found = outcomes[path]
            if isinstance(found, Fault):
                name = self.layout.relative(path)
                for e in episodes:
                    self.problems.append(found.problem(file=name, episode=int(self.layout.number[e]), camera=self.key))
                continue
            sizes[found.height, found.width] = sizes.get((found.height, found.width), 0) + len(episodes)
            if len(episodes):
                start[episodes] = self._verified_in_file(found, episodes, start[episodes])
        self._sizes(outcomes, sizes)
        return start

    def _verified_in_file(
        self, index: VideoIndex, episodes: Int64[np.ndarray, "n"], start: Int64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"]:
        zero, start = self._origin(index, episodes, start)
        worst = [self._deviation(index, zero, int(e), int(s)) for e, s in zip(episodes, start, strict=True)]
        unfit = np.array([not _fits(off) for off in worst])
        tiled = self._tiled(index, episodes, start) if unfit.any() else None
        if tiled is not None:
            self._drift(index, episodes[unfit], start[unfit], tiled[unfit])
            start, unfit = tiled, np.zeros(len(episodes), bool)
        for n in np.flatnonzero(unfit):
            self._unfit(index, int(episodes[n]), int(start[n]), worst[n])
        self._overlaps(index, episodes[~unfit], start[~unfit])
        return start

    def _origin(
        self, index: VideoIndex, episodes: Int64[np.ndarray, "n"], stated: Int64[np.ndarray, "n"]
    ) -> tuple[float, Int64[np.ndarray, "n"]]:
        """The container time that offset 0 means, and the starts under it.

        That is the time of the file's first frame, unless more episodes fit with the container's own zero.
        """
        first = index.seconds_at(0)
        zeros = [first] if abs(first) * self.layout.fps < 0.5 else [first, 0.0]
        tried = []
        for zero in zeros:
            if index.irregular is None:
                start = stated - round((first - zero) * self.layout.fps)
            else:
                start = _nearest(index.seconds(np.arange(index.count)), self.place.start_s[episodes] + zero)
            fits = [_fits(self._deviation(index, zero, int(e), int(s))) for e, s in zip(episodes, start, strict=True)]
            tried.append((sum(fits), zero, start))
        _, zero, start = max(tried, key=lambda attempt: attempt[0])
        return zero, start

    def _deviation(self, index: VideoIndex, zero: float, e: int, start: int) -> _Deviation | None:
        """The frame of the episode that is furthest off its time; None if some of its frames do not exist.

        On a regular grid that is the first or the last.
        """
        length = int(self.lengths[e])
        if start < 0 or start + length > index.count:
            return None
        frames = np.array([0, length - 1]) if index.irregular is None else np.arange(length)
        due = self.place.start_s[e] + frames / self.layout.fps
        off = index.seconds(start + frames) - zero - due
        allowed = self.tolerance_s + index.time_base / 2 + FPS_DIGITS * due
        at = int(np.argmax(np.abs(off) - allowed))
        return _Deviation(int(frames[at]), float(off[at]), bool(abs(off[at]) <= allowed[at]))

    def _tiled(
        self, index: VideoIndex, episodes: Int64[np.ndarray, "n"], start: Int64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"] | None:
        """Starts by counting, if that is certain, else None.

        Certain: the episodes fill the file exactly, begin on keyframes, keep the time grid within themselves, and lie
        where they are stated to lie but for a drift.
        """
        order = np.argsort(self.place.start_s[episodes], kind="stable")
        lengths = self.lengths[episodes][order]
        if int(lengths.sum()) != index.count:
            return None
        tiled = np.empty(len(episodes), np.int64)
        tiled[order] = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        if (np.abs(tiled - start) > 2 + _DRIFT * tiled).any() or not all(index.is_keyframe(int(s)) for s in tiled):
            return None
        zeros = index.seconds(tiled) - self.place.start_s[episodes]
        fits = (
            _fits(self._deviation(index, float(zero), int(e), int(s)))
            for zero, e, s in zip(zeros, episodes, tiled, strict=True)
        )
        return tiled if all(fits) else None

    def _drift(
        self,
        index: VideoIndex,
        episodes: Int64[np.ndarray, "n"],
        stated: Int64[np.ndarray, "n"],
        tiled: Int64[np.ndarray, "n"],
    ) -> None:
        moved = int((stated != tiled).sum())
        what = f"video offsets have drifted from the frames ({len(episodes)} episodes, {moved} by a frame or more)"
        value = f"from_timestamp {self.place.start_s[episodes[0]]:.4f} s"
        expected = f"{index.seconds_at(int(tiled[0])) - index.seconds_at(0):.4f} s"
        fix = "nothing to do: the episodes' lengths fill the file exactly and decide"
        self._report("offset-drift", int(episodes[0]), what, value, expected, fix, index, "warning")

    def _unfit(self, index: VideoIndex, e: int, start: int, off: _Deviation | None) -> None:
        length, fps = int(self.lengths[e]), self.layout.fps
        if index.fps is not None and index.irregular is None and abs(index.fps / fps - 1) > 1e-4:
            fix = f"correct `fps` in meta/info.json, or {_REENCODE}"
            self._report(
                "video-fps", e, "video has another frame rate", f"{index.fps:.6g} fps", f"{fps:g} fps", fix, index
            )
        elif off is None and start == 0:
            cut = f" (the file's table lists {index.listed})" if index.listed > index.count else ""
            what, fix = "video has fewer frames than the episode", f"the video is cut short: {_REENCODE}"
            self._report("short-video", e, what, f"{index.count} frames{cut}", f"{length} frames", fix, index)
        elif off is None:
            what, value = "video ends before the episode", f"{index.count} frames"
            expected = f"frames {start} … {start + length - 1} (from_timestamp {self.place.start_s[e]:.4f} s)"
            fix = f"the offset points past the end, or the file is cut short: correct meta/episodes, or {_REENCODE}"
            self._report("offset-past-end", e, what, value, expected, fix, index)
        else:
            due = float(self.place.start_s[e]) + off.frame / fps
            late = "late" if off.seconds > 0 else "early"
            value = f"frame {start + off.frame} is shown {abs(off.seconds) * 1e3:.3f} ms {late}"
            expected = f"{due:.4f} s (row {off.frame} of the episode) ± {self.tolerance_s * 1e3:g} ms"
            fix = f"{_REENCODE}; for a jitter that is real, set --data.tolerance-s"
            self._report("video-timestamp", e, "video frame is not at its row's time", value, expected, fix, index)

    def _overlaps(self, index: VideoIndex, episodes: Int64[np.ndarray, "n"], start: Int64[np.ndarray, "n"]) -> None:
        order = np.argsort(start, kind="stable")
        end = start + self.lengths[episodes]
        for a, b in itertools.pairwise(order):
            if start[b] < end[a]:
                for e, other in ((episodes[a], episodes[b]), (episodes[b], episodes[a])):
                    what, number = "two episodes claim the same video frames", self.layout.number[other]
                    value = f"frames {start[b]} … {min(end[a], end[b]) - 1} also in episode {number}"
                    fix = "one of the offsets is wrong: correct meta/episodes, or leave both out (bad_episodes=skip)"
                    self._report("overlap", int(e), what, value, "frames of its own", fix, index)

    def _sizes(self, outcomes: dict[Path, VideoIndex | Fault], sizes: dict[tuple[int, int], int]) -> None:
        """Files of another size than most episodes' are errors; a declared size that none has is a warning."""
        declared = image_size(self.layout.features[self.key])
        if not sizes:
            return
        usual = max(sizes, key=lambda size: (sizes[size], size == declared))
        if declared is not None and usual != declared:
            what, fix = "declared frame size differs from the video's", "nothing to do: frames are used as they are"
            value, expected = f"{declared} (height, width)", f"{usual}"
            problem = Problem("warning", "declared-size", what, value, expected, fix, "meta/info.json", camera=self.key)
            self.problems.append(problem)
        for e in np.flatnonzero(self.place.file >= 0):
            found = outcomes[self.place.files[int(self.place.file[e])]]
            if isinstance(found, VideoIndex) and (found.height, found.width) != usual and self.lengths[e] > 0:
                value, expected = f"{found.height}×{found.width}", f"{usual[0]}×{usual[1]}"
                self._report("frame-size", int(e), "video has another frame size", value, expected, _REENCODE, found)

    def _report(
        self,
        kind: str,
        e: int,
        what: str,
        value: str,
        expected: str,
        fix: str,
        index: VideoIndex | None,
        severity: Severity = "error",
    ) -> None:
        file = None if index is None else self.layout.relative(index.path)
        episode = int(self.layout.number[e])
        self.problems.append(
            Problem(severity, kind, what, value, expected, fix, file=file, episode=episode, camera=self.key)
        )
