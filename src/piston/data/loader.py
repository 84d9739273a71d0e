"""Sample number → Batch, in worker processes or none: the same batches for any number of workers; state = one integer.

Batch k holds sample numbers start + k·B … start + (k+1)·B − 1. Which row each of them is comes from `order.py`, all of
its randomness from `draws.py`; so a worker needs nothing but the number of a batch's first sample. Workers hold at most
`data.prefetch` finished batches each, all together `data.prefetch_gib`, and decode at most DECODE_GROUP frames per
camera at a time.
"""

import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from piston.batch import AugmentDraws, Batch, Observation, check
from piston.config.schema import RobotConfig, RunConfig
from piston.data.draws import draw
from piston.data.order import rows_of

log = logging.getLogger(__name__)

DECODE_GROUP = 64  # samples whose full-size frames are in memory at once, per worker
GRACE_S = 20  # seconds that a worker goes on after a SIGTERM
AUGMENT_FIELDS = ("crop_center_yx", "theta", "brightness", "contrast", "hue", "jitter")

Inputs = Callable[[dict[str, Any]], dict[str, Any]]


@runtime_checkable
class Frames(Protocol):
    """What the loader needs of a data set (`lerobot.Dataset` has it). Rows are 0 … num_frames − 1."""

    @property
    def fps(self) -> float: ...
    @property
    def image_keys(self) -> tuple[str, ...]: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def episode_index(self) -> np.ndarray: ...
    @property
    def episode_starts(self) -> np.ndarray: ...
    def column(self, key: str) -> np.ndarray: ...
    def episode_of(self, rows: np.ndarray) -> np.ndarray: ...
    def chunk_rows(self, row: int, horizon: int) -> np.ndarray: ...
    def task(self, row: int) -> str: ...
    def images(self, key: str, rows: np.ndarray) -> np.ndarray: ...


def check_robot(ds: Frames, robot: RobotConfig) -> None:
    """Raises ValueError if the data set lacks a camera or column of the robot, or has it in another width or rate."""
    missing = {slot: key for slot, key in robot.cameras.items() if key not in ds.image_keys}
    if missing:
        raise ValueError(
            f"robot {robot.name} takes cameras {missing} but the data set's image keys are {sorted(ds.image_keys)}; "
            "correct --data.robot.cameras, or leave a camera out to mask it"
        )
    state_dim = sum(_width(ds.column(key)) for key in robot.state_keys)
    action_dim = _width(ds.column(robot.action_key))
    for field, keys, has, wants in (
        ("state_dim", robot.state_keys, state_dim, robot.state_dim),
        ("action_dim", (robot.action_key,), action_dim, robot.action_dim),
    ):
        if has != wants:
            raise ValueError(
                f"data set columns {list(keys)} have {has} numbers per frame, robot {robot.name} expects {field} "
                f"{wants}; set --data.robot.{field.replace('_', '-')} {has}, or choose the robot that recorded this set"
            )
    if robot.fps is not None and abs(robot.fps - ds.fps) > 1e-3:
        raise ValueError(
            f"the data set has {ds.fps} frames per second, robot {robot.name} expects {robot.fps}; one action step is "
            "one frame, so the policy would act at the wrong speed: use data at that rate, or change --data.robot.fps"
        )


def _width(column: np.ndarray) -> int:
    return int(np.prod(column.shape[1:]))


@dataclass(frozen=True)
class Failure:
    """A user's error on its way out of a worker."""

    message: str


@dataclass(frozen=True)
class Packed:
    """All arrays of a batch in one block of memory: one shared segment between processes, one page-locked copy."""

    block: Tensor  # uint8
    layout: dict[str, tuple[torch.dtype, tuple[int, ...], int]]  # name → type, shape, offset in bytes

    @classmethod
    def like(cls, sample: dict[str, Any], batch_size: int) -> "Packed":
        """Room for `batch_size` samples of the given arrays."""
        layout, end = {}, 0
        for name, value in sample.items():
            array = np.asarray(value)
            shape = (batch_size, *array.shape)
            layout[name] = (torch.from_numpy(np.empty(0, array.dtype)).dtype, shape, end)
            end += -(-batch_size * array.nbytes // 64) * 64
        return cls(torch.empty(end, dtype=torch.uint8), layout)

    def tensors(self) -> dict[str, Tensor]:
        """Views, by name."""
        return {
            name: self.block[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, offset) in self.layout.items()
        }

    def pin_memory(self) -> "Packed":
        return Packed(self.block.pin_memory(), self.layout)


@dataclass(frozen=True)
class _Explained:
    """Adds to an exception which samples it happened on: in the message of a user's error, as a note to others."""

    maker: "BatchMaker"
    number: int
    others: int = 0  # decoded together with it

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        where = self.maker.locate(self.number) + (f" and the {self.others} decoded with it" if self.others else "")
        if isinstance(error, ValueError):
            raise ValueError(f"{error} [at {where}]") from error
        error.add_note(f"at {where}")


class BatchMaker:
    """First sample number → the batch's arrays. Holds no open file; crosses to a worker by pickle."""

    def __init__(self, run: RunConfig, ds: Frames, inputs: Inputs, *, batch_size: int, seed: int, train: bool) -> None:
        self.run, self.ds, self.inputs = run, ds, inputs
        self.batch_size, self.seed, self.train = batch_size, seed, train
        self.progress: Tensor | None = None  # [workers, 2], shared: pid and first sample number in work

    def rows(self, numbers: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        return rows_of(self.seed, numbers, self.ds.num_frames, validation=not self.train)

    def locate(self, number: int) -> str:
        """Where a sample comes from, for messages: "sample number 640 (episode 12, frame 33)"."""
        row = self.rows(np.array([number], np.int64))
        position = int(self.ds.episode_of(row)[0])
        frame = int(row[0] - self.ds.episode_starts[position])
        return (
            f"sample number {number} (episode {int(self.ds.episode_index[position])}, frame {frame}, row {int(row[0])})"
        )

    def __getitem__(self, first: int) -> Packed | Failure:
        worker = get_worker_info()
        if worker is not None and self.progress is not None:
            self.progress[worker.id] = torch.tensor([os.getpid(), first])
        try:
            return self.make(first)
        except ValueError as error:
            return Failure(str(error))

    def make(self, first: int) -> Packed:
        """Arrays by field of Batch, Observation and AugmentDraws, each [B, …]."""
        numbers = np.arange(first, first + self.batch_size, dtype=np.int64)
        rows = self.rows(numbers)
        packed, out = None, {}
        by_row = np.argsort(rows, kind="stable")  # neighbours in a video share its decoding
        for start in range(0, len(rows), DECODE_GROUP):
            members = by_row[start : start + DECODE_GROUP]
            with _Explained(self, int(numbers[members[0]]), len(members) - 1):
                frames = {slot: self.ds.images(key, rows[members]) for slot, key in self.run.data.robot.cameras.items()}
            for i, member in enumerate(members):
                number, row = int(numbers[member]), int(rows[member])
                with _Explained(self, number):
                    sample = self.inputs(self._raw(row, {slot: images[i] for slot, images in frames.items()}))
                sample |= {"sample_numbers": np.int64(number), **self._draws(number)}
                if packed is None:
                    packed = Packed.like(sample, self.batch_size)
                    out = {name: tensor.numpy() for name, tensor in packed.tensors().items()}
                for name, array in out.items():
                    array[member] = sample[name]
        assert packed is not None
        return packed

    def _raw(self, row: int, images: dict[str, np.ndarray]) -> dict[str, Any]:
        """The sample as the data set has it, under the robot's names."""
        robot, ds = self.run.data.robot, self.ds
        state = np.concatenate([ds.column(key)[row].reshape(-1) for key in robot.state_keys]).astype(np.float32)
        chunk = ds.chunk_rows(row, self.run.model.action_horizon)
        actions = ds.column(robot.action_key)[chunk].reshape(len(chunk), -1).astype(np.float32)
        return {
            "images": images,
            "state": state,
            "actions": actions,
            "prompt": ds.task(row) if self.run.data.prompt_from_task else None,
        }

    def _draws(self, number: int) -> dict[str, Any]:
        model = self.run.model
        draws = draw(
            self.seed,
            number,
            horizon=model.action_horizon,
            action_dim=model.action_dim,
            cameras=model.cameras if self.train and self.run.data.augment else (),
            image_size=model.image_size,
            validation=not self.train,
        )
        values: dict[str, Any] = {"noise": draws.noise, "time": draws.time}
        return values if draws.cameras is None else {**values, **draws.cameras._asdict()}


def batch_bytes(run: RunConfig, batch_size: int) -> int:
    """Memory of one batch, but for a few numbers per sample."""
    model = run.model
    images = len(model.cameras) * math.prod(model.image_size) * 3
    return batch_size * (images + 4 * (2 * model.action_horizon + 1) * model.action_dim + 5 * model.max_token_len)


def ahead(run: RunConfig, batch_size: int, workers: int) -> tuple[int, int]:
    """Loader processes, and batches that each makes ahead, within `data.prefetch_gib`: at least one of one."""
    room = max(1, int(run.data.prefetch_gib * 2**30 / batch_bytes(run, batch_size)))
    prefetch = max(1, min(run.data.prefetch, room // max(1, workers)))
    fewer = min(workers, room)
    if (fewer, prefetch) != (workers, run.data.prefetch) and workers:
        log.warning(
            "batches of %.2f GiB: %d of %d loader processes make %d of %d batches ahead (data.prefetch_gib is %g)",
            batch_bytes(run, batch_size) / 2**30, fewer, workers, prefetch, run.data.prefetch, run.data.prefetch_gib,
        )  # fmt: skip
    return fewer, prefetch


class Loader:
    """Endless batches from sample number `start` on. Iterate once, then close; `next_sample` is the whole state."""

    def __init__(
        self,
        run: RunConfig,
        ds: Frames,
        inputs: Inputs,
        *,
        start: int = 0,
        batch_size: int | None = None,
        seed: int | None = None,
        train: bool = True,
        num_workers: int | None = None,
        pin: bool = False,
    ) -> None:
        check_robot(ds, run.data.robot)
        self.next_sample = start
        self.run = run
        self.maker = BatchMaker(
            run,
            ds,
            inputs,
            batch_size=run.train.batch_size if batch_size is None else batch_size,
            seed=run.train.seed if seed is None else seed,
            train=train,
        )
        asked = run.data.num_workers if num_workers is None else num_workers
        self.num_workers, self.prefetch = ahead(run, self.maker.batch_size, asked)
        self._pin, self._checked = pin, False
        self._workers = self._start_workers() if self.num_workers else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        made = self.maker[self.next_sample] if self._workers is None else self._from_workers(self._workers)
        if isinstance(made, Failure):
            raise ValueError(made.message)
        batch = _assemble((made.pin_memory() if self._pin and self._workers is None else made).tensors())
        if not self._checked:
            self._check(batch)
        self.next_sample += self.maker.batch_size
        return batch

    def close(self) -> None:
        """Ends the workers, even while an exception's traceback still refers to them."""
        if self._workers is not None:
            self._workers._shutdown_workers()
            self._workers = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def locate(self, number: int) -> str:
        return self.maker.locate(number)

    def _check(self, batch: Batch) -> None:
        model = self.run.model
        check(
            batch,
            cameras=len(model.cameras),
            height=model.image_size[0],
            width=model.image_size[1],
            tokens=model.max_token_len,
            horizon=model.action_horizon,
            action_dim=model.action_dim,
        )
        self._checked = True

    def _firsts(self) -> Iterator[int]:
        first = self.next_sample
        while True:
            yield first
            first += self.maker.batch_size

    def _start_workers(self) -> _MultiProcessingDataLoaderIter:
        self.maker.progress = torch.zeros((self.num_workers, 2), dtype=torch.int64).share_memory_()
        batches = DataLoader(
            self.maker,  # pyright: ignore[reportArgumentType]  (anything with __getitem__ is a map-style data set)
            sampler=self._firsts(),  # pyright: ignore[reportArgumentType]  (endless: has no length)
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch,
            collate_fn=_as_is,
            pin_memory=self._pin,
            multiprocessing_context=_start_method(),
            worker_init_fn=_worker_manners,
            generator=torch.Generator(),  # leaves torch's global generator alone
        )
        return _MultiProcessingDataLoaderIter(batches)

    def _from_workers(self, workers: _MultiProcessingDataLoaderIter) -> Packed | Failure:
        try:
            return next(workers)
        except (RuntimeError, EOFError, OSError) as error:  # a death shows as any of them
            dead = _dead_workers(workers)
            if not dead:
                raise
            raise ValueError(self._obituary(dead)) from error

    def _obituary(self, dead: dict[int, int]) -> str:
        """What dead workers (process id → exit code) were doing."""
        assert self.maker.progress is not None
        working_on, size = dict(self.maker.progress.tolist()), self.maker.batch_size
        lives = []
        for pid, code in dead.items():
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            first = working_on.get(pid)
            what = "its first batch" if first is None else f"sample numbers {first} to {first + size - 1}"
            lives.append(f"{pid} {how} while making {what}")
        shm = Path("/dev/shm")
        free = f"; /dev/shm has {shutil.disk_usage(shm).free / 2**20:.0f} MiB free" if shm.exists() else ""
        return (
            f"loader process {', '.join(lives)}; expected it to outlive the run. Usual causes: out of memory (see "
            f"`dmesg`), or shared memory too small{free}. Lower --data.num-workers or --data.prefetch, or run with "
            "--data.num-workers 0 to see the error where it happens"
        )


def _dead_workers(workers: _MultiProcessingDataLoaderIter) -> dict[int, int]:
    """Process id → exit code of the workers that are gone. A moment's patience: pipes break before a death is known."""
    for _ in range(20):
        dead = {w.pid: w.exitcode for w in workers._workers if w.exitcode is not None}
        if dead:
            return dead
        time.sleep(0.05)
    return {}


def _assemble(tensors: dict[str, Tensor]) -> Batch:
    """The nested Batch of flat tensors."""
    observation = ("images", "image_masks", "state", "tokenized_prompt", "tokenized_prompt_mask")
    augment = {name: tensors[name] for name in AUGMENT_FIELDS if name in tensors}
    return Batch(
        observation=Observation(**{name: tensors[name] for name in observation}),
        augment=AugmentDraws(**augment) if augment else None,
        **{name: tensors[name] for name in ("actions", "noise", "time", "sample_numbers")},
    )


def _as_is(value: object) -> object:
    return value


def _start_method() -> str:
    """Never a plain fork: decoders and OpenMP hold threads. The fork server imports torch once, for all workers."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    preload = ["piston.data.loader", "piston.data.lerobot", "piston.data.transforms"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    return "forkserver"


def _worker_manners(_: int) -> None:
    """Ctrl-C and SIGTERM often reach every process of the run: the main one decides when it ends, and saves first.

    A worker does not outlive its main process (torch's own watch looks at the fork server, which workers keep alive),
    nor a SIGTERM by more than GRACE_S.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)
    threading.Thread(target=_leave_with_main, daemon=True).start()


def _leave_soon(_: int, __: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(GRACE_S)


def _leave_with_main() -> None:
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os._exit(1)
