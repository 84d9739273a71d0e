"""What a run reports, and the guard that stops it: losses stay on the device until a logging step looks at them.

`metrics.jsonl` has one line per logging step and one per validation; a resumed run rewinds it to its checkpoint, so
that no line is there twice. The same numbers go to the progress bar (plain lines where there is no terminal) and, if
asked for, to TensorBoard and Weights & Biases.
"""

import contextlib
import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from piston.config.schema import RunConfig
from piston.config.serialize import to_dict

T = TypeVar("T")
METRICS = "metrics.jsonl"


class NonFiniteError(ValueError):
    """A loss or gradient norm is NaN or infinite; the message names the step and the samples."""


class StepBuffer:
    """Per-sample losses and gradient norms of the steps since the last look. Writing never waits for the device."""

    def __init__(self, capacity: int, batch_size: int, device: torch.device) -> None:
        self._rows = torch.zeros((capacity, batch_size + 2), device=device)  # losses, their mean, gradient norm
        self._used = 0

    @property
    def full(self) -> bool:
        return self._used == len(self._rows)

    def push(self, loss_B: Float[Tensor, "B"], grad_norm: Float[Tensor, ""]) -> None:
        row = self._rows[self._used]
        row[:-2].copy_(loss_B)
        row[-2].copy_(loss_B.mean())
        row[-1].copy_(grad_norm)
        self._used += 1

    def take(self) -> Float[np.ndarray, "steps columns"]:
        """All rows since the last call; the one place where the host waits for the device."""
        rows, self._used = self._rows[: self._used].cpu().numpy().copy(), 0
        return rows


class Writer(Protocol):
    """Where scalars go."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, rewound to the step a run resumes from. A half line left by a kill is dropped."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in _whole_lines(path) if line["step"] <= step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class TensorBoard:
    """Event files under <experiment>/tensorboard; steps after a resumption replace those of the killed run."""

    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run, gone on with by the id kept in <experiment>/wandb_id.txt."""

    def __init__(self, run: RunConfig, directory: Path, step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = directory / "wandb_id.txt"
        known = id_file.read_text().strip() if step and id_file.exists() else None
        self._run = wandb.init(
            project=run.train.project_name,
            name=run.train.exp_name,
            id=known,
            resume="must" if known else None,
            config=to_dict(run),
            dir=str(directory),
        )
        id_file.write_text(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_writers(run: RunConfig) -> None:
    """Raises ValueError, before anything is loaded, for a logger whose package is not installed."""
    for wanted, package, extra in (
        (run.train.wandb, "wandb", "piston[wandb]"),
        (run.train.tensorboard, "tensorboard", "tensorboard"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--train.{package} is on but the package `{package}` is not installed; expected it to be importable: "
                f"pip install '{extra}', or leave the option out"
            )


class Metrics:
    """Records every step on the device; at logging steps averages and reports, or stops a run that went astray."""

    def __init__(
        self,
        run: RunConfig,
        directory: Path,
        device: torch.device,
        *,
        step: int = 0,
        pending: list[list[float]] | None = None,
        dataset_size: int = 0,
        locate: Callable[[int], str] = "sample number {}".format,
        console: Console | None = None,
    ) -> None:
        self.run, self.step = run, step  # steps done
        self.pending = pending or []  # [loss, gradient norm] of the steps not logged yet
        self.last: dict[str, float] = {}
        self.console = console or Console()
        self._device, self._locate, self._dataset_size = device, locate, dataset_size
        self._buffer = StepBuffer(min(run.train.log_interval, 1000), run.train.batch_size, device)
        self._lines = JsonLines(directory / METRICS, step)
        self._writers: list[Writer] = [self._lines]
        if run.train.tensorboard:
            self._writers.append(TensorBoard(directory, step))
        if run.train.wandb:
            self._writers.append(WandB(run, directory, step))
        self._start = self._since = time.monotonic()
        self._waited, self._paused, self._timed_from = 0.0, 0.0, step
        self._progress = _progress(self.console)
        self._task = self._progress.add_task("train", total=run.train.num_train_steps, completed=step, numbers="")

    def __enter__(self) -> "Metrics":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
        for writer in self._writers:
            writer.close()

    def wait_for(self, batches: Iterator[T]) -> T:
        """The next batch; the time it takes is reported as `data_wait`."""
        start = time.monotonic()
        batch = next(batches)
        self._waited += time.monotonic() - start
        return batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as training time."""
        start = time.monotonic()
        yield
        self._paused += time.monotonic() - start

    def record(self, loss_B: Float[Tensor, "B"], grad_norm: Float[Tensor, ""]) -> None:
        """One step is done. Does not wait for the device, except when log_interval exceeds the buffer."""
        if self._buffer.full:
            self.check()
        self._buffer.push(loss_B.detach(), grad_norm)
        self.step += 1
        self._progress.update(self._task, completed=self.step)

    def check(self) -> None:
        """Takes the recorded steps to the host. Raises NonFiniteError, naming the first bad step and its samples."""
        rows = self._buffer.take()
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            raise NonFiniteError(self._explain(rows, self.step - len(rows), int(bad[0])))
        self.pending += [[float(loss), float(norm)] for loss, norm in rows[:, -2:]]

    def _explain(self, rows: np.ndarray, first_step: int, bad: int) -> str:
        size = self.run.train.batch_size
        step, row = first_step + bad, rows[bad]
        first = step * size
        samples = [first + int(i) for i in np.flatnonzero(~np.isfinite(row[:-2]))]
        named = "; ".join(self._locate(n) for n in samples[:8])
        culprits = f"loss not finite for {named}" if samples else "the losses of all its samples are finite"
        after = rows[bad + 1 :]
        good_after = int(np.isfinite(after).all(axis=1).sum())
        return (
            f"step {step}: loss is {row[-2]}, gradient norm {row[-1]}; expected finite numbers. Sample numbers "
            f"{first} to {first + size - 1}; {culprits}. Of the {len(after)} steps after it, made without its "
            f"update, {good_after} were finite. No checkpoint was written after it. If one batch alone is bad, look at "
            "those episodes (`piston data check`); if all are, lower --optim.peak-lr; then go on with --train.resume"
        )

    def log(self, learning_rate: float, **values: float) -> None:
        """A logging step: means over the steps since the last one, speed, and where the time went."""
        self.check()
        losses, norms = np.array(self.pending, np.float64).reshape(-1, 2).T
        self.pending = []
        now, steps, samples = time.monotonic(), self.step - self._timed_from, self.step * self.run.train.batch_size
        trained = max(now - self._since - self._paused, 1e-9)
        self._emit(
            {
                "loss": float(losses.mean()),
                "grad_norm": float(norms.mean()),
                "learning_rate": learning_rate,
                **values,
                "samples": samples,
                "epoch": samples / self._dataset_size if self._dataset_size else 0.0,
                "samples_per_s": steps * self.run.train.batch_size / trained,
                "data_wait": self._waited / trained,
                "memory_gib": _memory_gib(self._device),
                "seconds": now - self._start,
            }
        )
        self._since, self._waited, self._paused, self._timed_from = time.monotonic(), 0.0, 0.0, self.step

    def log_validation(self, values: Mapping[str, float]) -> None:
        self._emit(values)

    def sync(self) -> None:
        """Waits until metrics.jsonl is on the disk; a checkpoint must not be ahead of it."""
        self._lines.sync()

    def _emit(self, values: Mapping[str, float]) -> None:
        self.last |= values
        for writer in self._writers:
            writer.write(self.step, values)
        if self.console.is_terminal:
            self._progress.update(self._task, numbers=_short(self.last))
        else:
            left = self.run.train.num_train_steps - self.step
            speed = self.last.get("samples_per_s", 0.0) / self.run.train.batch_size
            eta = f"  ETA {_clock(left / speed)}" if speed else ""
            self.console.print(
                f"step {self.step}/{self.run.train.num_train_steps}  {_short(values)}{eta}",
                highlight=False,
                soft_wrap=True,
            )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        refresh_per_second=2,
    )


_FORMATS = {
    "loss": "loss {:.5g}",
    "validation_loss": "validation {:.5g}",
    "validation_loss_raw": "raw {:.5g}",
    "grad_norm": "norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "samples_per_s": "{:.4g} samples/s",
    "memory_gib": "{:.1f} GiB",
}


def _short(values: Mapping[str, float]) -> str:
    shown = [form.format(values[name]) for name, form in _FORMATS.items() if name in values]
    if values.get("data_wait", 0.0) > 0.2:
        shown.append(f"waiting {values['data_wait']:.0%} for data")
    return "  ".join(shown)


def _clock(seconds: float) -> str:
    minutes, whole = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{whole:02}"


def _memory_gib(device: torch.device) -> float:
    """Peak memory: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
