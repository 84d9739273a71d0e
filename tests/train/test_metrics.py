"""Lines are there once, means cover every step, every logger gets the numbers, and bad ones stop the run."""

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from piston.config.schema import RunConfig, TrainConfig
from piston.train.metrics import JsonLines, Metrics, NonFiniteError, check_writers

CPU = torch.device("cpu")


def run_with(**train: Any) -> RunConfig:
    return RunConfig("tiny", train=TrainConfig(**{"batch_size": 4, "num_train_steps": 100, "log_interval": 3, **train}))


def open_metrics(folder: Path, console: Console | None = None, run: RunConfig | None = None, **options: Any) -> Metrics:
    return Metrics(run or run_with(), folder, CPU, console=console or Console(file=io.StringIO(), width=300), **options)


def record(metrics: Metrics, loss: float, norm: float = 1.0) -> None:
    metrics.record(torch.full((4,), loss), torch.tensor(norm))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    with open_metrics(tmp_path, dataset_size=24) as metrics:
        for loss in (1.0, 2.0, 6.0):
            record(metrics, loss, norm=2 * loss)
        metrics.log(1e-3, param_norm=5.0)
        record(metrics, 10.0)
        metrics.log(1e-4)
    first, second = read(tmp_path)
    assert (first["step"], first["loss"], first["grad_norm"], first["learning_rate"]) == (3, 3.0, 6.0, 1e-3)
    assert (first["param_norm"], first["samples"], first["epoch"]) == (5.0, 12, 0.5)
    assert first["samples_per_s"] > 0
    assert 0 <= first["data_wait"] <= 1
    assert (second["step"], second["loss"], second["samples"]) == (4, 10.0, 16)


def test_steps_not_logged_yet_survive_a_resumption(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        record(metrics, 1.0)
        record(metrics, 2.0)
        metrics.check()
        pending = json.loads(json.dumps(metrics.pending))
    with open_metrics(tmp_path, step=2, pending=pending) as metrics:
        record(metrics, 6.0)
        metrics.log(1e-3)
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(3, 3.0)]


def test_resuming_rewinds_the_file_and_drops_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "loss": 1.0}\n{"step": 6, "loss": 0.5}\n{"step": 9, "loss": 0.2}\n{"step": 12, "lo')
    lines = JsonLines(path, 6)
    lines.write(9, {"loss": 0.25})
    lines.close()
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(3, 1.0), (6, 0.5), (9, 0.25)]
    JsonLines(path, 0).close()
    assert path.read_text() == ""


def test_a_log_interval_longer_than_the_buffer_loses_no_step(tmp_path: Path) -> None:
    with open_metrics(tmp_path, run=run_with(log_interval=2500, num_train_steps=2500)) as metrics:
        for step in range(2500):
            record(metrics, float(step))
        metrics.log(1e-3)
    assert read(tmp_path)[0]["loss"] == 2499 / 2


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("-inf"))])
def test_a_bad_step_is_found_whenever_somebody_looks(tmp_path: Path, loss: float, norm: float) -> None:
    with open_metrics(tmp_path, step=10) as metrics:
        record(metrics, 1.0)
        record(metrics, loss, norm)
        record(metrics, 1.0)
        with pytest.raises(NonFiniteError, match=r"step 11: .*Sample numbers 44 to 47.*Of the 1 steps.* 1 were finite"):
            metrics.check()
    assert read(tmp_path) == []


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_metrics(tmp_path, Console(file=out, width=40)) as metrics:
        for _ in range(3):
            record(metrics, 0.125)
        metrics._waited = 1e9
        metrics.log(2.5e-5)
        metrics.log_validation({"validation_loss": 0.25, "validation_loss_raw": 0.5})
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 3/100  loss 0.125  norm 1  lr 2.5e-05  ")
    assert "samples/s" in first
    assert "for data" in first
    assert "ETA 0:00:" in first
    assert second.startswith("step 3/100  validation 0.25  raw 0.5")
    assert [line["step"] for line in read(tmp_path)] == [3, 3]


def test_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_metrics(tmp_path, Console(file=out, width=120, force_terminal=True)) as metrics:
        for _ in range(3):
            record(metrics, 0.125)
        metrics.log(2.5e-5)
    assert "3/100" in out.getvalue()
    assert "loss 0.125" in out.getvalue()


def test_waiting_and_pauses_are_told_apart_from_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("piston.train.metrics.time.monotonic", lambda: clock[0])

    def slow():
        while True:
            clock[0] += 1.0
            yield 0

    with open_metrics(tmp_path) as metrics:
        batches = slow()
        for _ in range(2):
            metrics.wait_for(batches)
            clock[0] += 3.0
            record(metrics, 1.0)
        with metrics.paused():
            clock[0] += 1000.0
        metrics.log(1e-3)
    line = read(tmp_path)[0]
    assert line["data_wait"] == pytest.approx(0.25)
    assert line["samples_per_s"] == pytest.approx(1.0)
    assert line["seconds"] == pytest.approx(1008.0)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (0, 3):
        with open_metrics(tmp_path, run=run_with(tensorboard=True), step=step) as metrics:
            for _ in range(3):
                record(metrics, 0.5 + step)
            metrics.log(1e-3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (6, 3.5)]


class FakeWandb(types.ModuleType):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, float]] = []
        self.finished, self.id = 0, "abc123"

    def init(self, **options: Any) -> "FakeWandb":
        self.started.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values["loss"]))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 3):
        with open_metrics(tmp_path, run=run_with(wandb=True, project_name="p"), step=step) as metrics:
            record(metrics, 0.5)
            metrics.log(1e-3)
    assert [(s["project"], s["id"], s["resume"]) for s in fake.started] == [("p", None, None), ("p", "abc123", "must")]
    assert fake.started[0]["config"]["train"]["batch_size"] == 4
    assert fake.logged == [(1, 0.5), (4, 0.5)]
    assert fake.finished == 2


def test_a_logger_that_is_not_installed_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piston.train.metrics.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'piston\[wandb\]'"):
        check_writers(run_with(wandb=True))
    with pytest.raises(ValueError, match="tensorboard"):
        check_writers(run_with(tensorboard=True))
    check_writers(run_with())
