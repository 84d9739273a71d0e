"""The loop end to end on real videos: it learns, resumes bit for bit, stops cleanly, and never saves a broken state."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from piston.config.schema import RunConfig
from piston.config.serialize import from_json
from piston.data.order import rows_of, split_episodes
from piston.model.pi0 import Pi0
from piston.train import loop
from piston.train.checkpoint import TENSOR_FILES, load_policy_weights, open_checkpoint, whole_checkpoints
from piston.train.metrics import Metrics, NonFiniteError
from piston.train.optim import Optimizer
from piston.train.sources import Sources, open_sources

MakeRun = Callable[..., RunConfig]
CLOCKS = {"samples_per_s", "data_wait", "memory_gib", "seconds"}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def train(run: RunConfig) -> loop.TrainResult:
    return loop.train(run, quiet())


def directory(run: RunConfig) -> Path:
    return run.train.checkpoint_dir / run.name / run.train.exp_name


def lines(run: RunConfig) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    text = (directory(run) / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in text.splitlines()]


def tensors(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    return {f"{group}/{name}": t for group in TENSOR_FILES for name, t in checkpoint.tensors(group).items()}


def assert_same_state(a: Path, b: Path) -> None:
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class Killed(BaseException):
    """Stands for the kernel: nothing in the program may catch it."""


@contextlib.contextmanager
def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` right after update number `step`."""
    original = Metrics.record

    def record(self: Metrics, loss_B: Tensor, grad_norm: Tensor) -> None:
        original(self, loss_B, grad_norm)
        if self.step == step:
            action()

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "record", record)
        yield


def die() -> None:
    raise Killed


@pytest.fixture
def whole(make_run: MakeRun, tmp_path: Path) -> RunConfig:
    """A run of ten steps that nothing disturbed, with validation."""
    run = make_run(checkpoints=tmp_path / "whole", validation_fraction=0.4)
    assert train(run).exit_code == 0
    return run


def test_a_run_leaves_lines_checkpoints_and_its_configuration(whole: RunConfig) -> None:
    where = directory(whole)
    training = [line for line in lines(whole) if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 11))
    assert [line["samples"] for line in training] == list(range(8, 88, 8))
    assert [line["step"] for line in lines(whole) if "validation_loss" in line] == [5, 10]
    assert [c.step for c in whole_checkpoints(where)] == [10]  # keep_last = 1
    assert from_json((where / "run.json").read_text()) == whole
    recorded = json.loads((where / "10" / "run.json").read_text())
    assert recorded["versions"]["torch"] == torch.__version__
    assert json.loads((where / "10" / "state.json").read_text())["next_sample"] == 80
    assert (where / "10" / "norm_stats.json").read_bytes() == Path(str(whole.data.norm_stats)).read_bytes()
    assert {p.name for p in where.iterdir()} == {"10", "run.json", "metrics.jsonl", ".lock"}


def test_it_learns(make_run: MakeRun) -> None:
    run = make_run(num_train_steps=60, log_interval=20, augment=False, decay_steps=60)
    train(run)
    first, *_, last = [line["loss"] for line in lines(run)]
    assert last < 0.8 * first


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_killed_run_resumes_bit_for_bit(
    make_run: MakeRun, whole: RunConfig, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    run = make_run(validation_fraction=0.4, num_workers=workers)
    with at_step(monkeypatch, 6, die), pytest.raises(Killed):
        train(run)
    assert [c.step for c in whole_checkpoints(directory(run))] == [4]
    with (directory(run) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.')  # the half line of a kill in mid-write
    result = train(make_run(validation_fraction=0.4, num_workers=workers, resume=True))
    assert (result.step, result.exit_code) == (10, 0)
    assert lines(run) == lines(whole)
    assert_same_state(directory(run) / "10", directory(whole) / "10")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    options = {"log_interval": 3, "save_interval": 100}
    undisturbed = make_run(checkpoints=tmp_path / "undisturbed", **options)
    train(undisturbed)
    run = make_run(**options)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), number)):
        result = train(run)
    assert (result.step, result.stopped_by, result.exit_code) == (5, number, 128 + number)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert result.checkpoint == directory(run) / "5"
    assert train(make_run(**options, resume=True)).step == 10
    assert lines(run) == lines(undisturbed)  # the mean of steps 4 to 6 includes the two before the stop
    assert_same_state(directory(run) / "10", directory(undisturbed) / "10")


def test_a_second_ctrl_c_interrupts_at_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with at_step(monkeypatch, 5, twice), pytest.raises(KeyboardInterrupt):
        train(make_run())


def test_it_trains_outside_the_main_thread(make_run: MakeRun) -> None:
    results = []
    worker = threading.Thread(target=lambda: results.append(train(make_run(num_train_steps=2))))
    worker.start()
    worker.join()
    assert results[0].step == 2


def test_a_finished_run_has_nothing_to_resume_and_can_be_lengthened(make_run: MakeRun, whole: RunConfig) -> None:
    changes = {"checkpoints": whole.train.checkpoint_dir, "validation_fraction": 0.4, "resume": True}
    before = tensors(directory(whole) / "10")
    assert train(make_run(**changes)).exit_code == 0
    assert all(torch.equal(t, before[name]) for name, t in tensors(directory(whole) / "10").items())
    longer = make_run(**changes, num_train_steps=12)
    assert train(longer).step == 12
    assert lines(longer)[-1]["step"] == 12


def test_statistics_and_tokenizer_that_are_gone_come_from_the_checkpoint(
    make_run: MakeRun, data_set: tuple[Path, Path], tmp_path: Path
) -> None:
    stats = shutil.copy(data_set[1], tmp_path / "stats.json")
    train(make_run(norm_stats=Path(stats), num_train_steps=4))
    Path(stats).unlink()
    assert train(make_run(norm_stats=Path(stats), num_train_steps=5, resume=True)).step == 5


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_touched_without_being_asked(make_run: MakeRun) -> None:
    train(make_run(num_train_steps=2))
    with pytest.raises(ValueError, match=r"holds a run already.*--train\.resume.*--train\.overwrite"):
        train(make_run())
    assert [c.step for c in whole_checkpoints(directory(make_run()))] == [2]
    assert train(make_run(overwrite=True, num_train_steps=3)).step == 3
    assert [c.step for c in whole_checkpoints(directory(make_run()))] == [3]
    assert len(lines(make_run())) == 3


def test_a_resumed_run_names_every_setting_that_changes_its_mathematics(make_run: MakeRun) -> None:
    train(make_run(num_train_steps=4))
    changed = make_run(resume=True, batch_size=4, seed=7, peak_lr=1e-2, log_interval=2, augment=False)
    with pytest.raises(ValueError, match="cannot resume") as caught:
        train(changed)
    message = str(caught.value)
    for expected in ("train.batch_size: 8 → 4", "train.seed: 42 → 7", "optim.peak_lr: 0.003 → 0.01", "data.augment"):
        assert expected in message
    assert "4 of it differ" in message
    assert "log_interval" not in message


def test_a_resumed_run_notices_other_data_and_statistics(
    make_run: MakeRun, data_set: tuple[Path, Path], tmp_path: Path
) -> None:
    from make_sets import Spec, make_set  # pyright: ignore[reportMissingImports]

    train(make_run(num_train_steps=4))
    other = make_set(tmp_path / "other", Spec(lengths=(12, 15, 1, 18, 12)))
    with pytest.raises(ValueError, match="content of the data set"):
        train(make_run(resume=True, root=other))
    stats = json.loads(data_set[1].read_text())
    stats["norm_stats"]["state"]["q99"][0] += 0.5
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    with pytest.raises(ValueError, match="content of the norm statistics"):
        train(make_run(resume=True, norm_stats=tmp_path / "stats.json"))
    assert train(make_run(resume=True, root=shutil.copytree(data_set[0], tmp_path / "moved"))).step == 10


def test_settings_that_only_round_differently_are_logged(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    train(make_run(num_train_steps=4))
    train(make_run(num_train_steps=6, resume=True, accumulate=2, num_workers=1))
    assert "train.accumulate: 1 → 2, so losses agree only up to the order of sums" in caplog.text
    assert "data.num_workers: 0 → 1" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root": None}, r"data\.root is None.*--data\.root"),
        ({"norm_stats": Path("nowhere.json")}, "nowhere.json"),
        ({"tokenizer": Path("nowhere.model")}, "nowhere.model"),
        ({"device": "cuda:99"}, r"train\.device is 'cuda:99'"),
        ({"device": "abacus"}, r"train\.device is 'abacus'.*expected auto"),
        ({"wandb": True}, r"--train\.wandb is on.*piston\[wandb\]"),
    ],
)
def test_a_run_that_cannot_start_says_why(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("piston.train.metrics.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=message):
        train(make_run(**changes))


def test_a_full_disk_is_found_before_training(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("piston.train.checkpoint.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"0\.00 GiB free.*--train\.checkpoint-dir"):
        train(make_run())


# --- numbers that are none -------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the loss of one sample NaN."""
    original = loop.piece_loss

    def piece_loss(model: Pi0, batch: Any) -> Tensor:
        factor = torch.where(batch.sample_numbers == number, torch.nan, 1.0)
        return original(model, batch) * factor[:, None]

    monkeypatch.setattr(loop, "piece_loss", piece_loss)


@pytest.mark.parametrize("log_interval", [1, 5, 1000])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, log_interval: int
) -> None:
    run = make_run(log_interval=log_interval, save_interval=4)
    poison(monkeypatch, 53)  # step 6, samples 48 to 55
    with pytest.raises(NonFiniteError) as caught:
        train(run)
    row = rows_of(42, np.array([53]), 57)[0]
    message = str(caught.value)
    assert message.startswith("step 6: loss is nan")
    assert "Sample numbers 48 to 55" in message
    assert f"loss not finite for sample number 53 (episode {np.searchsorted([12, 27, 28, 46], row, 'right')}" in message
    assert f"row {row})" in message
    if log_interval > 1:
        assert "Of the 1 steps after it, made without its update, 1 were finite" in message
    assert [c.step for c in whole_checkpoints(directory(run))] == [4]
    assert all(np.isfinite(line["loss"]) for line in lines(run))


def test_a_gradient_that_is_not_finite_names_the_whole_batch(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Optimizer.update

    def update(self: Optimizer) -> Tensor:
        if self.step == 2:
            next(p for p in self.parameters.values() if p.grad is not None).grad.fill_(torch.inf)  # pyright: ignore[reportOptionalMemberAccess]
        return original(self)

    monkeypatch.setattr(Optimizer, "update", update)
    with pytest.raises(NonFiniteError, match=r"step 2: .*norm inf.*16 to 23; the losses of all its samples are finite"):
        train(make_run())


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(make_run: MakeRun) -> Sources:
    return open_sources(make_run(validation_fraction=0.4), None)


def fresh(run: RunConfig) -> tuple[Pi0, Optimizer]:
    """A model whose norms, gates and heads are not zero, so that every part of it has a gradient."""
    model = Pi0.build(run.model, device="cpu", seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model, Optimizer(dict(model.named_parameters()), run.optim)


def test_accumulation_changes_only_the_order_of_sums(sources: Sources) -> None:
    batch = next(sources.loader(start=0, pin=False))
    results = []
    for accumulate in (1, 2, 8):
        model, optimizer = fresh(sources.run)
        loss_B, norm = loop.training_step(model, optimizer, batch, accumulate)
        results.append((loss_B, norm, optimizer.m))
    for loss_B, norm, moments in results[1:]:
        assert torch.allclose(loss_B, results[0][0], rtol=1e-5)
        assert torch.allclose(norm, results[0][1], rtol=1e-5)
        for name, m in moments.items():
            assert torch.allclose(m, results[0][2][name], rtol=1e-3, atol=1e-7), name


def test_a_step_never_waits_for_the_device(sources: Sources, tmp_path: Path) -> None:
    # Tensors on `meta` have no values: whatever the host asked of them would raise.
    meta = torch.device("meta")
    batch = next(sources.loader(start=0, pin=False)).to(meta)
    model = Pi0.on_meta(sources.run.model)
    optimizer = Optimizer(dict(model.named_parameters()), sources.run.optim)
    run = dataclasses.replace(sources.run, train=dataclasses.replace(sources.run.train, log_interval=5))
    with Metrics(run, tmp_path, meta, console=quiet()) as metrics:
        for _ in range(2):
            metrics.record(*loop.training_step(model, optimizer, batch, 2))
        with pytest.raises(NotImplementedError, match="meta"):
            metrics.check()


def test_validation_is_the_same_every_time_and_uses_the_average(sources: Sources) -> None:
    model, optimizer = fresh(sources.run)
    job = loop.Job(sources.run, model, optimizer, [])
    cpu = torch.device("cpu")
    first = loop.validate(job, sources.validation_batches(), cpu)
    assert first == loop.validate(job, sources.validation_batches(), cpu)
    assert first["validation_loss"] == first["validation_loss_raw"]  # no update yet
    loop.training_step(model, optimizer, next(sources.loader(start=0, pin=False)))
    raw = {name: p.detach().clone() for name, p in model.named_parameters()}
    second = loop.validate(job, sources.validation_batches(), cpu)
    assert second["validation_loss"] != second["validation_loss_raw"]
    assert second["validation_loss_raw"] != first["validation_loss_raw"]
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())


def test_validation_sees_only_held_out_episodes(sources: Sources) -> None:
    train_positions, held_out = split_episodes(42, 5, 0.4)
    assert sources.train.episode_index.tolist() == train_positions.tolist()
    assert sources.validation is not None
    assert sources.validation.episode_index.tolist() == held_out.tolist()
    batches = sources.validation_batches()
    assert [b.sample_numbers[0].item() for b in batches] == [0, 8]
    assert all(b.augment is None for b in batches)
    assert sources.validation_batches()[0] is batches[0]


def test_the_policy_weights_are_the_average(whole: RunConfig) -> None:
    path = directory(whole) / "10"
    weights, checkpoint = load_policy_weights(path), open_checkpoint(path)
    Pi0.on_meta(whole.model).load_state_dict(weights, assign=True)
    ema, raw = checkpoint.tensors("ema"), checkpoint.tensors("model")
    assert all(torch.equal(weights[name], ema[name]) for name in ema)
    assert any(not torch.equal(weights[name], raw[name]) for name in raw)


def test_no_average_is_kept_where_the_run_has_none(make_run: MakeRun) -> None:
    run = make_run(ema_decay=None, num_train_steps=3)
    train(run)
    path = directory(run) / "3"
    assert not (path / "ema.safetensors").exists()
    assert load_policy_weights(path).keys() == open_checkpoint(path).tensors("model").keys()
    assert train(make_run(ema_decay=None, num_train_steps=4, resume=True)).step == 4


def test_the_number_of_threads_is_the_runs_own(make_run: MakeRun) -> None:
    before = torch.get_num_threads()
    try:
        run = make_run(threads=before + 1, num_train_steps=1)
        train(run)
        assert torch.get_num_threads() == before + 1
        recorded = json.loads((directory(run) / "1" / "run.json").read_text())
        assert recorded["hardware"]["torch_threads"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_memory_that_runs_out_names_the_options_that_help(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(loop, "training_step", greedy)
    message = r"Tried to allocate 20.00 GiB\.\); expected .* 4 samples at once \(batch of 8 in 2 pieces\).*accumulate"
    with pytest.raises(ValueError, match=message):
        train(make_run(accumulate=2))


@pytest.mark.parametrize("changes", [{"version": "v2.0"}, {"version": "v2.1"}, {"images": True}], ids=str)
def test_every_format_trains(
    make_run: MakeRun, data_set: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    from make_sets import Spec, make_set  # pyright: ignore[reportMissingImports]

    expected = make_run(checkpoints=tmp_path / "v3", num_train_steps=1)
    run = make_run(data_root=make_set(tmp_path / "set", Spec(**changes)), num_train_steps=1)
    train(run)
    train(expected)
    (line,), (reference,) = lines(run), lines(expected)
    assert line["loss"] == pytest.approx(reference["loss"], abs=1e-3)  # the same numbers, videos compressed anew
