"""What a data set says about itself, in one form for every LeRobot version; nothing is checked against its files."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from piston.data.problems import Problem

FPS_DIGITS = 2e-6  # info.json rounds 30000/1001 to 29.97: that much of a second per second is no fault
INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True)
class Placement:
    """Where one video camera's episodes lie: in `files[file[e]]` from `start_s[e]` seconds on (file -1: not stated)."""

    files: tuple[Path, ...]
    file: Int64[np.ndarray, "e"]
    start_s: Float64[np.ndarray, "e"]
    end_s: Float64[np.ndarray, "e"]  # NaN: not stated


@dataclass(frozen=True)
class Layout:
    """A data set's metadata. Episodes are sorted by their number; arrays over episodes are parallel."""

    root: Path
    version: str
    info: dict[str, Any]
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    number: Int64[np.ndarray, "e"]  # the data set's own episode numbers
    length: Int64[np.ndarray, "e"]  # frames
    episode_tasks: tuple[tuple[str, ...], ...]
    data_files: tuple[Path, ...]
    file_episode: Int64[np.ndarray, "f"] | None  # one file per episode: its number; None: the rows say
    pointed_file: Int64[np.ndarray, "e"]  # data file the metadata names for each episode; -1: one that is not there
    videos: dict[str, Placement]
    image_features: tuple[str, ...]  # cameras, in the order of info.json; depth maps left out
    problems: list[Problem] = field(default_factory=list)  # found while reading the metadata

    def relative(self, path: Path | str) -> str:
        """A file's name inside the data set, for messages."""
        path = Path(path)
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Declared shape of a column: () for index columns, whatever is declared; None for undeclared ones."""
        declared = self.features.get(key, {}).get("shape")
        if key in INDEX_COLUMNS:
            return ()
        if declared is None:
            return None
        return tuple(int(n) for n in declared) if isinstance(declared, list | tuple) else (int(declared),)

    def is_camera(self, key: str) -> bool:
        """Whether the feature is declared as images or video (depth maps included)."""
        return self.features.get(key, {}).get("dtype") in ("image", "video")


def image_size(feature: dict[str, Any]) -> tuple[int, int] | None:
    """Declared (height, width) of a camera: by the names of its axes, else by the position of the channel axis."""
    shape, names = feature.get("shape"), feature.get("names")
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        return None
    height, width, channels = (int(n) for n in shape)
    if isinstance(names, list | tuple) and {"height", "width"} <= set(names) and len(names) == 3:
        return int(shape[list(names).index("height")]), int(shape[list(names).index("width")])
    return (height, width) if channels in (1, 3, 4) or height not in (1, 3, 4) else (width, channels)


def is_depth(feature: dict[str, Any]) -> bool:
    """Whether a camera feature is a depth map: said so in any place the versions have, or grey of 10 bits and more."""
    for details in (feature, feature.get("info"), feature.get("video_info")):
        if not isinstance(details, dict):
            continue
        deep_grey = re.match(r"gray1\d", str(details.get("video.pix_fmt", "")))
        if details.get("video.is_depth_map") or details.get("is_depth_map") or deep_grey:
            return True
    return False
