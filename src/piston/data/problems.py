"""What is wrong with a data set: every Problem says what, the value, what was expected, where, and what to do."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]

_LFS_MARK = b"version https://git-lfs"
_LISTED = 100  # problems written out in one error message


@dataclass(frozen=True)
class Problem:
    """One finding.

    `error`: the episode (or the data set) cannot be used; `warning`: it can, but look at it; `note`: good to know.
    `kind` is a stable name a program may test for; `episode` is the data set's own number.
    """

    severity: Severity
    kind: str
    what: str
    value: str
    expected: str
    fix: str
    file: str | None = None
    episode: int | None = None
    camera: str | None = None

    @property
    def where(self) -> str:
        """`episode 3, camera observation.images.top, file videos/…`, as far as it is known."""
        parts = (
            None if self.episode is None else f"episode {self.episode}",
            None if self.camera is None else f"camera `{self.camera}`",
            None if self.file is None else f"file {self.file}",
        )
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}: {self.value}, expected {self.expected}{where}; {self.fix}"

    def to_json(self) -> dict[str, str | int | None]:
        """A flat dictionary of the fields."""
        return dataclasses.asdict(self)


class BadDataset(ValueError):
    """A data set that cannot be opened; `problems` holds every reason."""

    def __init__(self, root: Path, problems: Sequence[Problem], hint: str = "") -> None:
        self.problems = tuple(problems)
        lines = [f"data set {root} cannot be used: {len(self.problems)} problem(s)"]
        lines += [f"  {n}. {problem}" for n, problem in enumerate(self.problems[:_LISTED], start=1)]
        if len(self.problems) > _LISTED:
            lines.append(f"  … and {len(self.problems) - _LISTED} more: `piston data check {root}` lists them all")
        if hint:
            lines.append(hint)
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Fault:
    """Why one file cannot be read: the place-independent part of a Problem."""

    kind: str
    what: str
    value: str
    expected: str
    fix: str

    def problem(
        self, *, file: str, episode: int | None = None, camera: str | None = None, severity: Severity = "error"
    ) -> Problem:
        """This fault at a place."""
        return Problem(severity, **dataclasses.asdict(self), file=file, episode=episode, camera=camera)


def file_fault(path: Path, noun: str) -> Fault | None:
    """What is visibly wrong with a file before any reader opens it (absent, empty, a git-LFS pointer), or None."""
    again = "download or copy the file again, or leave the episode out (bad_episodes=skip)"
    if not path.is_file():
        return Fault(f"missing-{noun}", f"{noun} file is missing", "no such file", "a file", again)
    size = path.stat().st_size
    if size == 0:
        return Fault(f"empty-{noun}", f"{noun} file is empty", "0 bytes", f"a {noun} file", again)
    if size < 1024:
        with path.open("rb") as file:
            if file.read(len(_LFS_MARK)) == _LFS_MARK:
                return Fault(
                    "lfs-pointer",
                    f"{noun} file is a git-LFS pointer",
                    f"{size} bytes of text",
                    f"a {noun} file",
                    "run `git lfs pull` in the data set, or download it with a client that resolves LFS",
                )
    return None
