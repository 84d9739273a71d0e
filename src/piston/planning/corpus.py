"""Data for so many timesteps: episodes, hours, storage, epochs; from a rate, or measured from a data set's metadata."""

from dataclasses import dataclass
from pathlib import Path

from piston.config.schema import require
from piston.planning import formulas
from piston.planning.case import Case
from piston.planning.figure import NOT_REPORTED, Figure, Section, derived, given, measured, quoted
from piston.planning.request import Request

SEED_RATE = quoted(73.9 / 12.02, "GB/h", "73.9 GB / 12.02 h, 3 × 480×640 h264; sizing note (seed 2)", 2.0, 6.2)
SEED_SMALL_RATE = quoted(2.13, "GB/h", "224² all-intra; sizing note (seed 2)", 0.7, 3.7)


@dataclass(frozen=True)
class Measured:
    """What a data set's metadata and file sizes say."""

    root: Path
    frames: int
    episodes: int
    fps: float | int
    cameras: int
    bytes: int
    video_bytes: int

    @property
    def hours(self) -> float | int:
        return self.frames / self.fps / 3600

    @property
    def gb_per_hour(self) -> float | int:
        return self.bytes / 1e9 / self.hours


def measure(root: Path) -> Measured:
    """Counts frames in the metadata and bytes on disk. Raises ValueError for what is not a LeRobot data set."""
    from piston.data.lerobot import read_layout

    require(root.is_dir(), f"--data {root} is not a directory; give a LeRobot data set, the directory that holds meta/")
    layout = read_layout(root)
    frames = int(layout.length.sum())
    require(frames > 0, f"--data {root} has no frames in its metadata; check it with `piston data check {root}`")
    videos = {f for placement in layout.videos.values() for f in placement.files}
    sizes = {f: f.stat().st_size for f in {*videos, *layout.data_files} if f.is_file()}
    video_bytes = sum(sizes.get(f, 0) for f in videos)
    cameras = len(layout.videos) + len(layout.image_features)
    cameras = len({*layout.videos, *layout.image_features}) if cameras else 0
    return Measured(root, frames, len(layout.number), layout.fps, cameras, sum(sizes.values()), video_bytes)


def corpus_frames(request: Request, found: Measured | None) -> float | int | None:
    """Distinct frames of the corpus; None when nothing says."""
    if found is not None:
        return float(found.frames)
    return None if request.hours is None else request.hours * 3600 * request.fps


def rates(request: Request, found: Measured | None) -> tuple[Figure, Figure]:
    """GB per hour, native and re-encoded at model resolution."""
    native = SEED_RATE if request.gb_per_hour is None else given(request.gb_per_hour, "GB/h", "--gb-per-hour")
    if found is not None and request.gb_per_hour is None:
        native = measured(found.gb_per_hour, "GB/h", f"file sizes of {found.root}")
    small = request.gb_per_hour_small
    return native, SEED_SMALL_RATE if small is None else given(small, "GB/h", "--gb-per-hour-small")


def section(case: Case, frames: float | int, found: Measured | None) -> Section:
    """The data part of the report."""
    request = case.request
    fps = found.fps if found is not None else request.fps
    length = found.frames / found.episodes if found is not None else request.episode_seconds * request.fps
    native, small = rates(request, found)
    hours = formulas.hours(frames, fps)
    distinct = corpus_frames(request, found)
    figures: dict[str, Figure] = {
        "timesteps seen": derived(frames, "frames", "steps × batch"),
        "episodes, if seen once": derived(formulas.episodes(frames, length), "", f"{length:g} frames per episode"),
        "hours, if seen once": derived(hours, "h", f"{fps:g} fps"),
        "native rate": native,
        "re-encoded rate": small,
        "native storage": derived(hours * native.number / 1e3, "TB", "hours × rate", *_scaled(hours, native)),
        "re-encoded storage": derived(hours * small.number / 1e3, "TB", "hours × rate", *_scaled(hours, small)),
        "bytes per frame-set": derived(native.number * 1e9 / 3600 / fps, "B", "rate / fps: all cameras of one moment"),
        "MB per episode": derived(native.number * 1e3 * length / fps / 3600, "MB", "rate × episode"),
        "epochs over the corpus": NOT_REPORTED
        if distinct is None
        else derived(frames / distinct, "", "seen / distinct"),
    }
    if found is not None:
        source = f"metadata and file sizes of {found.root}"
        figures |= {
            "corpus frames": measured(found.frames, "frames", source),
            "corpus episodes": measured(found.episodes, "", source),
            "corpus hours": measured(found.hours, "h", source),
            "corpus size": measured(found.bytes / 1e9, "GB", source),
            "video share of bytes": measured(100 * found.video_bytes / max(found.bytes, 1), "%", source),
        }
    notes = (
        "Storage is for seeing every frame once. The re-encoded rate depends on codec and quality (0.7–3.7 GB/h).",
    )
    return Section("corpus", "Corpus", figures, (), notes)


def _scaled(hours: float | int, rate: Figure) -> tuple[float | int | None, float | int | None]:
    if rate.low is None or rate.high is None:
        return None, None
    return hours * rate.low / 1e3, hours * rate.high / 1e3
