"""A checkpoint is a directory that is either whole or does not exist; saving, finding, checking and loading them.

    <checkpoint_dir>/<recipe>/<exp_name>/<step>/
        model.safetensors  ema.safetensors  adam_m.safetensors  adam_v.safetensors
        run.json  norm_stats.json  tokenizer.model|json  state.json  manifest.json

`<step>` counts the updates done, so `1000` holds 1000 of them (openpi's directory 1000 holds 1001: it counts from 0).
Everything is written into `<step>.tmp`, the manifest (size and SHA-256 of every file) last, flushed to the disk, and
renamed. A directory without a manifest whose sizes fit is ignored. There is no pickle in it.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from piston.config.schema import RunConfig
from piston.config.serialize import from_json, leaves

log = logging.getLogger(__name__)

MANIFEST, STATE, RUN, NORM_STATS = "manifest.json", "state.json", "run.json", "norm_stats.json"
TENSOR_FILES = ("model", "ema", "adam_m", "adam_v")
FORMAT = 1

# A resumed run may change these: they move no number of the run, only where, how long, or how it is watched.
FREE_FIELDS = frozenset(
    {"name", "data.root", "data.norm_stats", "data.tokenizer", "data.num_workers", "data.prefetch", "data.tolerance_s"}
    | {"data.cache", "data.prefetch_gib"}
    | {f"train.{name}" for name in ("exp_name", "init", "checkpoint_dir", "resume", "overwrite", "num_train_steps")}
    | {f"train.{name}" for name in ("log_interval", "save_interval", "keep_last", "keep_period", "validation_interval")}
    | {f"train.{name}" for name in ("validation_batches", "tensorboard", "wandb", "project_name")}
)
# These change the order of floating-point sums: the run goes on, but not bit for bit.
ROUNDING_FIELDS = frozenset({"train.accumulate", "train.device", "train.threads"})


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be used; the message names the file and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    @property
    def run(self) -> RunConfig:
        return from_json(_read(self.path / RUN).decode())

    @property
    def state(self) -> dict[str, Any]:
        return json.loads(_read(self.path / STATE))

    def tensors(
        self, name: str, device: torch.device | str = "cpu", without: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """The tensors of one of TENSOR_FILES, by parameter name; those in `without` are not read."""
        file = self.path / f"{name}.safetensors"
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                return {key: opened.get_tensor(key) for key in opened.keys() if key not in without}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(f"cannot read {file}: {error}; the checkpoint is damaged: use another one") from error

    def has(self, name: str) -> bool:
        return (self.path / f"{name}.safetensors").exists()


def open_checkpoint(path: Path, files: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint in a directory. Raises BadCheckpoint if files are missing, cut, or not those that were written.

    `files`: the ones whose hashes are compared; None: all.
    """
    fault = _fault(path, hashes=files)
    if fault is not None:
        raise BadCheckpoint(f"checkpoint {path} cannot be used: {fault}; {_alternative(path)}")
    return Checkpoint(path, int(json.loads(_read(path / MANIFEST))["step"]))


def load_policy_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The state dict to serve: EMA weights where the run kept an EMA, else the raw ones. Their hashes are checked."""
    checkpoint = open_checkpoint(path, ("model.safetensors", "ema.safetensors"))
    averaged = checkpoint.tensors("ema", device) if checkpoint.has("ema") else {}
    return {**checkpoint.tensors("model", device, without=averaged), **averaged}


def whole_checkpoints(directory: Path) -> list[Checkpoint]:
    """Checkpoints of an experiment whose files are all there in the right sizes, by ascending step."""
    if not directory.is_dir():
        return []
    steps = sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
    found = []
    for step in steps:
        fault = _fault(directory / str(step), hashes=())
        if fault is None:
            found.append(Checkpoint(directory / str(step), step))
        else:
            log.warning("ignoring %s: %s", directory / str(step), fault)
    return found


def _alternative(path: Path) -> str:
    others = [c for c in whole_checkpoints(path.parent) if c.path != path and _fault(c.path, hashes=None) is None]
    if others:
        return f"{others[-1].path} is whole: move {path.name} away to go on from there"
    return "no other checkpoint of this experiment is whole: start again with --train.overwrite"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror}; the checkpoint is damaged: use another") from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault(path: Path, *, hashes: Collection[str] | None) -> str | None:
    """What keeps a directory from being a whole checkpoint; None if nothing does. `hashes`: see `open_checkpoint`."""
    manifest_file = path / MANIFEST
    if not manifest_file.is_file():
        return f"it has no {MANIFEST}, so it was never finished" if path.is_dir() else "there is no such directory"
    try:
        manifest = json.loads(manifest_file.read_bytes())
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        form = int(manifest["format"])
        int(manifest["step"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MANIFEST} is damaged ({error!r})"
    if form > FORMAT:
        return f"it has format {form}, this version of Piston reads up to {FORMAT}"
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"file {name} is missing"
        if (path / name).stat().st_size != size:
            return f"file {name} has {(path / name).stat().st_size} bytes, expected {size}"
    chosen = [name for name in files if hashes is None or name in hashes]
    if chosen:
        with ThreadPoolExecutor(len(chosen)) as pool:
            for name, found in zip(chosen, pool.map(lambda name: _hash(path / name), chosen), strict=True):
                if found != files[name][1]:
                    return f"file {name} has SHA-256 {found[:12]}…, expected {files[name][1][:12]}…"
    return None


# --- writing ---------------------------------------------------------------------------------------------------------


def _sync(path: Path) -> None:
    """Waits until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Deletes a checkpoint so that no half of it can be taken for a whole."""
    doomed = path.with_name(path.name + ".old.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def write_checkpoint(
    path: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], files: Mapping[str, bytes]
) -> None:
    """Writes and renames a checkpoint directory into place; on any OSError nothing is left of it and it is raised."""
    temporary = path.with_name(path.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        for name, group in tensors.items():
            contiguous = {key: tensor.detach().contiguous() for key, tensor in group.items()}
            save_file(contiguous, temporary / f"{name}.safetensors")
        seal(temporary, step)
        if path.exists():  # not whole, or it would not be written again
            _remove(path)
        temporary.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"could not write checkpoint {path}: {error}") from error


def seal(directory: Path, step: int) -> None:
    """Writes the manifest of the files in a directory, the last step to a whole checkpoint, and flushes them all."""
    written = sorted(directory.iterdir())
    for file in written:
        file.chmod(directory.stat().st_mode & 0o666)  # safetensors writes for the owner alone
        _sync(file)
    with ThreadPoolExecutor(len(written)) as pool:
        digests = list(pool.map(_hash, written))
    entries = {
        file.name: {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(written, digests, strict=True)
    }
    manifest = {"format": FORMAT, "step": step, "files": entries}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2))
    _sync(directory / MANIFEST)
    _sync(directory)


def write_file(path: Path, content: bytes) -> None:
    """Replaces one file at once: it holds the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    _sync(temporary)
    temporary.replace(path)


# --- one experiment --------------------------------------------------------------------------------------------------


def experiment_directory(run: RunConfig) -> Path:
    return run.train.checkpoint_dir / run.name / run.train.exp_name


@dataclass(frozen=True)
class Experiment:
    """The directory of one run, held by this process alone."""

    directory: Path
    run: RunConfig
    latest: Checkpoint | None  # what to resume from

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], files: Mapping[str, bytes]) -> Checkpoint:
        """Writes checkpoint `step` if it is not there, then deletes what retention does not keep."""
        path = self.directory / str(step)
        if _fault(path, hashes=()) is not None:
            try:
                write_checkpoint(path, step, tensors, files)
            except OSError as error:
                free = shutil.disk_usage(self.directory).free / 2**30
                older = [str(c.step) for c in whole_checkpoints(self.directory)]
                raise ValueError(
                    f"{error}; the disk has {free:.2f} GiB free. Nothing of it is left, and checkpoints "
                    f"{', '.join(older) or '(none)'} are untouched: make room, then go on with --train.resume"
                ) from error
        self._retain()
        return Checkpoint(path, step)

    def check_space(self, size: int) -> None:
        """Raises ValueError if the disk has no room for a checkpoint of `size` bytes next to the one it replaces."""
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise ValueError(
                f"the disk of {self.directory} has {free / 2**30:.2f} GiB free, one checkpoint needs "
                f"{size / 2**30:.2f} GiB, expected room for it before training starts: make room, or set "
                "--train.checkpoint-dir elsewhere"
            )

    def _retain(self) -> None:
        keep, period = self.run.train.keep_last, self.run.train.keep_period
        for old in whole_checkpoints(self.directory)[:-keep]:
            if period is None or old.step % period != 0:
                try:
                    _remove(old.path)
                except OSError as error:
                    log.warning("could not delete the old checkpoint %s (%s); delete it yourself", old.path, error)


@contextlib.contextmanager
def open_experiment(run: RunConfig) -> Iterator[Experiment]:
    """Creates or reopens the run's directory and locks it.

    As in openpi: a directory that holds a run already needs `resume` or `overwrite`. Resuming where there is no
    checkpoint starts from step 0, but not where there are only damaged ones. Half-written checkpoints are deleted.
    """
    directory = experiment_directory(run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"cannot write in the run's directory {directory} ({error.strerror}: {error.filename}); expected a folder "
            "that is there or can be made: set --train.checkpoint-dir elsewhere, or choose another --train.exp-name"
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training in {directory}; expected to be alone there: stop it, or choose another "
                "--train.exp-name"
            ) from error
        _make_ready(directory, run)
        for leftover in directory.glob("*.tmp"):
            log.warning("deleting the half-written %s", leftover)
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        whole = whole_checkpoints(directory)
        if run.train.resume and not whole:
            _refuse_damaged(directory)
        yield Experiment(directory, run, whole[-1] if whole else None)


def _refuse_damaged(directory: Path) -> None:
    """Raises BadCheckpoint if there are checkpoints, none of them whole: a crash leaves no such ones."""
    steps = sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
    faults = [f"{step}: {_fault(directory / str(step), hashes=())}" for step in steps]
    if faults:
        raise BadCheckpoint(
            f"cannot resume {directory}: none of its checkpoints is whole ({'; '.join(faults)}); restore one from a "
            "copy, move them away to start at step 0, or start again with --train.overwrite"
        )


def _make_ready(directory: Path, run: RunConfig) -> None:
    entries = [entry for entry in directory.iterdir() if entry.name != ".lock"]
    if not entries or run.train.resume:
        return
    if not run.train.overwrite:
        raise ValueError(
            f"{directory} holds a run already; expected a new directory: go on with it (--train.resume), delete it "
            "(--train.overwrite), or choose another --train.exp-name"
        )
    if not (directory / RUN).is_file():
        raise ValueError(
            f"--train.overwrite would delete {directory}, which has no {RUN} and so is no run of Piston; delete it "
            "yourself, or choose another --train.exp-name"
        )
    for entry in sorted(entries, key=lambda entry: entry.name == RUN):  # the file that says "a run of Piston" goes last
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def check_same_run(checkpoint: Checkpoint, run: RunConfig, identity: Mapping[str, str]) -> None:
    """Raises ValueError if the checkpoint belongs to a run with other mathematics; logs every other changed field.

    `identity`: hashes of what the configuration only points to (data set, statistics, tokenizer), as in state.json.
    """
    old, new = leaves(checkpoint.run), leaves(run)
    changed = {path: (old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)}
    refused = [
        f"{path}: {was!r} → {now!r}"
        for path, (was, now) in changed.items()
        if path not in FREE_FIELDS | ROUNDING_FIELDS
    ]
    saved = checkpoint.state["identity"]
    contents = {key: (saved.get(key), identity.get(key)) for key in {**saved, **identity}}
    refused += [f"content of the {key}: {was} → {now}" for key, (was, now) in contents.items() if was != now]
    if refused:
        listing = "\n  ".join(refused)
        raise ValueError(
            f"cannot resume {checkpoint.path}: what changes the run's mathematics is expected to be as it was, but "
            f"{len(refused)} of it differ:\n  {listing}\n"
            "Set them back, or start a new run with another --train.exp-name"
        )
    for path, (was, now) in changed.items():
        if path not in {"train.resume", "train.overwrite"}:
            bits = ", so losses agree only up to the order of sums" if path in ROUNDING_FIELDS else ""
            log.warning("resuming with %s: %r → %r%s", path, was, now, bits)


def digest(*parts: bytes | np.ndarray) -> str:
    """A short hash of content, for `identity`."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return whole.hexdigest()[:32]
