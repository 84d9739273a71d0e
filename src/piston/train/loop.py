"""Training, on one screen: batch → loss → backward → update → report → validate → save. Read this file first.

Everything random is a function of (seed, sample number), and step k takes sample numbers k·B … (k+1)·B − 1: so a run
that was killed and resumed gives the losses, bit for bit, of one that was not.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from piston.batch import Batch
from piston.config.schema import RunConfig
from piston.data.augment import prepare
from piston.data.loader import Loader
from piston.model.flow import flow_loss
from piston.model.init import initialise
from piston.model.pi0 import Pi0
from piston.train import checkpoint
from piston.train.checkpoint import Checkpoint, Experiment, open_experiment
from piston.train.freeze import freeze, trainable_table
from piston.train.initial import load_initial
from piston.train.metrics import Metrics, check_writers
from piston.train.optim import Optimizer, learning_rate, parameter_norm
from piston.train.provenance import run_json
from piston.train.sources import Sources, open_sources


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int  # updates done
    checkpoint: Path  # the last one
    metrics: dict[str, float]  # the last value of each
    stopped_by: signal.Signals | None  # None: it ran to its end

    @property
    def exit_code(self) -> int:
        """0 for a finished run; 128 + signal number, as a shell has it, for one that was asked to stop."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by


def train(run: RunConfig, console: Console | None = None) -> TrainResult:
    """Trains until `num_train_steps` updates are done, or SIGINT or SIGTERM comes; saves in either case.

    Raises ValueError for anything a user can mend: data, statistics, checkpoints, settings that do not fit a resumed
    run, a loss that is not finite.
    """
    check_writers(run)
    console, settings, device = console or Console(), run.train, find_device(run.train.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with contextlib.ExitStack() as opened, OutOfMemory(run):
        experiment = opened.enter_context(open_experiment(run))
        sources = open_sources(run, experiment.latest)
        job = start(run, experiment, sources, device, console)
        batches = opened.enter_context(sources.loader(start=job.samples, pin=device.type == "cuda"))
        metrics = opened.enter_context(job.metrics(experiment, sources, batches, device, console))
        stop = opened.enter_context(StopSignal())

        for step in range(job.step, settings.num_train_steps):
            batch = metrics.wait_for(batches).to(device)
            loss_B, grad_norm = training_step(job.model, job.optimizer, batch, settings.accumulate)
            metrics.record(loss_B, grad_norm)
            if job.due(settings.log_interval):
                metrics.log(learning_rate(run.optim, step), param_norm=job.parameter_norm())
            if sources.validation is not None and job.due(settings.validation_interval):
                with metrics.paused():
                    metrics.log_validation(validate(job, sources.validation_batches(), device))
            if job.due(settings.save_interval) or stop.received:
                with metrics.paused():
                    save(experiment, job, sources, metrics)
            if stop.received:
                break
        return finish(experiment, job, metrics, stop, console)


def training_step(
    model: Pi0, optimizer: Optimizer, batch: Batch, accumulate: int = 1
) -> tuple[Float[Tensor, "B"], Float[Tensor, ""]]:
    """One update; the loss of every sample before it, and the gradient norm before the clip. No host sync.

    With `accumulate` the batch goes through in that many pieces; loss and gradients are those of the whole batch up to
    the order of sums.
    """
    losses = []
    for piece in pieces(batch, accumulate):
        loss_BA = piece_loss(model, piece)
        (loss_BA.mean() / accumulate).backward()
        losses.append(loss_BA.detach().mean(dim=1))
    return torch.cat(losses), optimizer.update()


def piece_loss(model: Pi0, batch: Batch) -> Float[Tensor, "B A"]:
    """The flow-matching loss of a batch as the loader made it: images are scaled and augmented here, on the device."""
    ready = prepare(batch, model.config.cameras)
    return flow_loss(model, ready.observation, ready.actions, ready.noise, ready.time)


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """The batch in `count` equal runs of samples."""
    size = len(batch.time) // count
    for first in range(0, size * count, size):
        yield _rows(batch, slice(first, first + size))


def _rows(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _rows(getattr(value, f.name), rows) for f in dataclasses.fields(value)}
        )
    return value


@torch.no_grad()
def validate(job: "Job", batches: Sequence[Batch], device: torch.device) -> dict[str, float]:
    """Mean loss over the held-out batches, which are the same every time: with the EMA weights, as the reference
    evaluates, and with the raw ones."""
    accumulate = job.run.train.accumulate

    def mean_loss() -> float:
        losses = [
            piece_loss(job.model, piece.to(device)).mean(dim=1) for b in batches for piece in pieces(b, accumulate)
        ]
        return torch.cat(losses).mean().item()

    raw = mean_loss()
    if job.optimizer.ema is None:
        return {"validation_loss": raw}
    with job.optimizer.ema_weights():
        return {"validation_loss": mean_loss(), "validation_loss_raw": raw}


# --- starting, saving, ending ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Everything that training changes."""

    run: RunConfig
    model: Pi0
    optimizer: Optimizer
    pending: list[list[float]]  # losses and gradient norms not logged yet when the checkpoint was written

    @property
    def step(self) -> int:
        """Updates done."""
        return self.optimizer.step

    @property
    def samples(self) -> int:
        """Samples used, and the number of the next one."""
        return self.step * self.run.train.batch_size

    def parameter_norm(self) -> float:
        """Norm of the kernels, frozen ones included, as openpi logs it."""
        return parameter_norm(dict(self.model.named_parameters())).item()

    def due(self, interval: int) -> bool:
        """Whether something that happens every `interval` steps, and after the last one, happens now."""
        return self.step % interval == 0 or self.step == self.run.train.num_train_steps

    def metrics(
        self, experiment: Experiment, sources: Sources, batches: Loader, device: torch.device, console: Console
    ) -> Metrics:
        return Metrics(
            self.run,
            experiment.directory,
            device,
            step=self.step,
            pending=self.pending,
            dataset_size=sources.train.num_frames,
            locate=batches.locate,
            console=console,
        )


def start(run: RunConfig, experiment: Experiment, sources: Sources, device: torch.device, console: Console) -> Job:
    """The state to train from: the experiment's last checkpoint, or the reference's initialisers, then `train.init`."""
    latest = experiment.latest
    model = Pi0.on_meta(run.model)
    freeze(model)
    model.to_empty(device=device)
    if latest is None:
        initialise(model, run.train.seed)
        if run.train.init is not None:
            load_initial(model, run, console)
        job = Job(run, model, Optimizer(dict(model.named_parameters()), run.optim), [])
        if run.train.resume:
            console.print(f"no checkpoint in {experiment.directory}: starting at step 0")
    else:
        checkpoint.open_checkpoint(latest.path)
        checkpoint.check_same_run(latest, run, sources.identity)
        job = _restore(run, latest, model, device)
        console.print(f"resumed from {latest.path}: {job.step} steps done")
    experiment.check_space(sum(t.nbytes for group in tensors_of(job).values() for t in group.values()))
    checkpoint.write_file(experiment.directory / checkpoint.RUN, run_json(run).encode())
    if not all(p.requires_grad for p in model.parameters()):
        console.print(trainable_table(model))
    count = sum(p.numel() for p in model.parameters())
    console.print(f"{run.name}: {count:,} parameters on {device}; {sources.describe()}", highlight=False)
    return job


def _restore(run: RunConfig, latest: Checkpoint, model: Pi0, device: torch.device) -> Job:
    model.load_state_dict(latest.tensors("model", device))
    optimizer = Optimizer(dict(model.named_parameters()), run.optim)
    ema = latest.tensors("ema", device) if latest.has("ema") else None
    optimizer.load(latest.step, latest.tensors("adam_m", device), latest.tensors("adam_v", device), ema)
    return Job(run, model, optimizer, latest.state["pending"])


def tensors_of(job: Job) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by file and parameter name."""
    groups = {"model": job.model.state_dict(), "adam_m": job.optimizer.m, "adam_v": job.optimizer.v}
    return groups if job.optimizer.ema is None else {**groups, "ema": job.optimizer.ema}


def save(experiment: Experiment, job: Job, sources: Sources, metrics: Metrics) -> None:
    """A checkpoint of the current step, if every loss up to it was finite."""
    metrics.check()
    metrics.sync()
    state: dict[str, Any] = {
        "step": job.step,
        "next_sample": job.samples,
        "pending": metrics.pending,
        "identity": sources.identity,
    }
    files = {
        checkpoint.RUN: run_json(job.run).encode(),
        checkpoint.STATE: json.dumps(state, indent=2).encode(),
        **sources.files,
    }
    experiment.save(job.step, tensors_of(job), files)


def finish(experiment: Experiment, job: Job, metrics: Metrics, stop: "StopSignal", console: Console) -> TrainResult:
    """The result, and a word to the user about what there is now."""
    last = experiment.directory / str(job.step)
    stopped = stop.received if job.step < job.run.train.num_train_steps else None
    if stopped is not None:
        console.print(f"stopped by {stopped.name} after {job.step} steps, saved in {last}; go on with --train.resume")
    else:
        console.print(f"finished: {job.step} steps, saved in {last}")
    return TrainResult(job.step, last, dict(metrics.last), stopped)


@dataclass(frozen=True)
class OutOfMemory:
    """Tells the user what to change when the GPU's memory runs out."""

    run: RunConfig

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            size, count = self.run.train.batch_size, self.run.train.accumulate
            raise ValueError(
                f"the GPU's memory ran out ({str(error).splitlines()[0]}); expected model, optimizer and "
                f"{size // count} samples at once (batch of {size} in {count} pieces) to fit: raise "
                "--train.accumulate, which changes no result beyond rounding, or lower --train.batch-size"
            ) from error


class StopSignal:
    """SIGINT and SIGTERM let the current step finish; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be handled
            self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        os.write(2, f"\n{self.received.name}: finishing this step and saving\n".encode())  # print is not reentrant


def find_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise ValueError(
            f"train.device is {name!r}, which cannot be used here ({str(error).splitlines()[0]}); expected auto or one "
            f"of {here}: set --train.device"
        ) from error
    return device
