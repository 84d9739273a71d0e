"""The same batches for any number of workers; every failure says which sample it was."""

import dataclasses
import multiprocessing
import os
import signal
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_frames import FakeFrames, FakeInputs, tiny_run

from piston.batch import Batch
from piston.config.schema import DataConfig, RobotConfig, RunConfig
from piston.data.draws import draw
from piston.data.loader import Loader, ahead, batch_bytes, check_robot
from piston.data.order import rows_of

RUN = tiny_run()


def loader(ds: FakeFrames | None = None, run: RunConfig = RUN, inputs: FakeInputs | None = None, **options) -> Loader:
    return Loader(run, FakeFrames() if ds is None else ds, FakeInputs(run) if inputs is None else inputs, **options)


def fields(batch: Batch) -> dict[str, torch.Tensor]:
    observation = {f.name: getattr(batch.observation, f.name) for f in dataclasses.fields(batch.observation)}
    augment = (
        {f.name: getattr(batch.augment, f.name) for f in dataclasses.fields(batch.augment)} if batch.augment else {}
    )
    return {**observation, **augment, "actions": batch.actions, "noise": batch.noise, "time": batch.time}


def assert_equal(a: Batch, b: Batch) -> None:
    assert torch.equal(a.sample_numbers, b.sample_numbers)
    assert fields(a).keys() == fields(b).keys()
    for name, value in fields(a).items():
        assert torch.equal(value, fields(b)[name]), name


def test_a_batch_holds_the_rows_of_its_sample_numbers() -> None:
    ds, start = FakeFrames(), 3000
    with loader(ds, start=start) as batches:
        batch = next(batches)
        assert batches.next_sample == start + 8
    numbers = np.arange(start, start + 8)
    rows = rows_of(RUN.train.seed, numbers, ds.num_frames)
    assert batch.sample_numbers.tolist() == numbers.tolist()
    assert batch.observation.images[:, 0, 0, 0, 0].tolist() == (rows * 2 % 256).tolist()
    assert batch.observation.images[:, 1, 0, 0, 0].tolist() == ((rows * 2 + 1) % 256).tolist()
    assert batch.observation.image_masks.tolist() == [[True, True, False]] * 8
    assert batch.observation.images.dtype == torch.uint8
    for i, (number, row) in enumerate(zip(numbers, rows, strict=True)):
        assert np.array_equal(batch.observation.state[i, :3], ds.column("joints")[row])
        assert batch.observation.state[i, 3] == row % 2
        assert np.array_equal(batch.actions[i, :, :3], ds.column("action")[ds.chunk_rows(int(row), 5)])
        draws = draw(42, int(number), horizon=5, action_dim=6, cameras=RUN.model.cameras, image_size=(28, 28))
        assert np.array_equal(batch.noise[i], draws.noise)
        assert float(batch.time[i]) == float(draws.time)
        assert draws.cameras is not None
        assert batch.augment is not None
        assert np.array_equal(batch.augment.crop_center_yx[i], draws.cameras.crop_center_yx)
        assert np.array_equal(batch.augment.jitter[i], draws.cameras.jitter)


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    runs = []
    for workers in (0, 1, 2):
        with loader(num_workers=workers) as batches:
            runs.append(list(islice(batches, 7)))
    for batches in runs[1:]:
        for a, b in zip(runs[0], batches, strict=True):
            assert_equal(a, b)


def test_a_loader_started_later_continues_the_sequence() -> None:
    with loader() as batches:
        whole = list(islice(batches, 5))
    with loader(start=24, num_workers=1) as batches:
        for a, b in zip(whole[3:], islice(batches, 2), strict=True):
            assert_equal(a, b)


def test_decoding_in_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with loader() as batches:
        whole = next(batches)
    monkeypatch.setattr("piston.data.loader.DECODE_GROUP", 3)
    with loader() as batches:
        assert_equal(whole, next(batches))


def test_validation_is_not_augmented_and_has_its_own_randomness() -> None:
    with loader(train=False) as validation, loader() as training:
        a, b = next(validation), next(training)
    assert a.augment is None
    assert not torch.equal(a.noise, b.noise)
    assert not torch.equal(a.observation.images, b.observation.images)
    off = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, augment=False))
    with loader(run=off) as batches:
        plain = next(batches)
    assert plain.augment is None
    assert torch.equal(plain.noise, b.noise)


def test_the_global_random_state_is_left_alone() -> None:
    expected, numpys = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    for workers in (0, 1):
        with loader(num_workers=workers) as batches:
            next(batches)
    assert torch.equal(torch.get_rng_state(), expected)
    assert repr(np.random.get_state(legacy=False)) == numpys


@pytest.mark.parametrize("workers", [0, 1])
def test_a_frame_that_cannot_be_decoded_names_its_samples(workers: int) -> None:
    with loader(FakeFrames(fail_row=30), num_workers=workers) as batches, pytest.raises(ValueError) as caught:
        list(islice(batches, 20))
    assert "cannot decode camera top" in str(caught.value)
    assert "sample number" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_user_error_in_a_transform_names_sample_row_and_episode(workers: int) -> None:
    row = rows_of(42, np.arange(8), FakeFrames().num_frames).min()  # the first one decoded
    number = rows_of(42, np.arange(8), FakeFrames().num_frames).argmin()
    episode = FakeFrames().episode_of(np.array([row]))[0]
    where = rf"sample number {number} \(episode {100 + episode}, frame \d+, row {row}\)"
    inputs = FakeInputs(RUN, error=ValueError)
    with (
        loader(inputs=inputs, num_workers=workers) as batches,
        pytest.raises(ValueError, match="broken transform.*" + where),
    ):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_any_other_error_keeps_its_type_and_names_the_sample(workers: int) -> None:
    with (
        loader(inputs=FakeInputs(RUN, error=KeyError), num_workers=workers) as batches,
        pytest.raises(KeyError) as caught,
    ):
        next(batches)
    story = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "broken transform" in story
    assert "at sample number" in story
    assert "episode 10" in story


def test_a_worker_that_dies_is_an_error_with_its_sample_numbers() -> None:
    ds = FakeFrames(kill_row=20)
    number = int(np.flatnonzero(rows_of(42, np.arange(ds.num_frames), ds.num_frames) == 20)[0])
    first = number // 8 * 8
    with loader(ds, num_workers=2) as batches, pytest.raises(ValueError) as caught:
        list(islice(batches, 20))
    assert f"was killed by SIGKILL while making sample numbers {first} to {first + 7}" in str(caught.value)
    assert "--data.num-workers 0" in str(caught.value)


def test_a_worker_killed_from_outside_is_an_error_and_no_hang() -> None:
    with loader(num_workers=1) as batches:
        next(batches)
        assert batches.maker.progress is not None
        os.kill(int(batches.maker.progress[0, 0]), signal.SIGKILL)
        with pytest.raises(ValueError, match=r"was killed by SIGKILL while making sample numbers \d+ to \d+"):
            list(islice(batches, 20))


@pytest.mark.parametrize(
    ("batches", "workers", "expected"),
    [(5.1, 2, (2, 2)), (5.1, 0, (0, 2)), (5.1, 4, (4, 1)), (0.3, 4, (1, 1)), (3.4, 2, (2, 1)), (4.1, 2, (2, 2))],
)
def test_batches_made_ahead_are_bounded_in_bytes(batches: float, workers: int, expected: tuple[int, int]) -> None:
    gib = batches * batch_bytes(RUN, 8) / 2**30
    small = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, prefetch_gib=gib))
    assert ahead(small, 8, workers) == expected


def test_few_batches_ahead_are_the_same_batches() -> None:
    run = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, prefetch_gib=1e-9))
    with loader() as plain, loader(run=run, num_workers=2) as bounded:
        assert (bounded.num_workers, bounded.prefetch) == (1, 1)
        for a, b in zip(islice(plain, 4), islice(bounded, 4), strict=True):
            assert_equal(a, b)


def test_a_batch_is_as_large_as_it_is_taken_to_be() -> None:
    with loader() as batches:
        batch = next(batches)
    size = sum(value.nbytes for value in fields(batch).values())
    assert batch_bytes(RUN, 8) == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": {"base_0_rgb": "front"}}, r"\{'base_0_rgb': 'front'\}.*\['top', 'wrist'\]"),
        ({"state_dim": 5}, "4 numbers per frame, robot fake expects state_dim 5"),
        ({"action_dim": 2}, "3 numbers per frame, robot fake expects action_dim 2"),
        ({"fps": 30}, "10.0 frames per second, robot fake expects 30"),
    ],
)
def test_a_robot_that_does_not_fit_the_data_set_is_named(changes: dict, message: str) -> None:
    robot = dataclasses.replace(RUN.data.robot, **changes)
    with pytest.raises(ValueError, match=message):
        check_robot(FakeFrames(), robot)


def test_a_first_batch_of_the_wrong_shape_is_named() -> None:
    wide = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, max_token_len=20))
    with loader(run=wide, inputs=FakeInputs(RUN)) as batches, pytest.raises(ValueError, match="tokenized_prompt"):
        next(batches)


def test_scalar_columns_and_defaults_fit_any_robot() -> None:
    robot = RobotConfig("one", {}, ("gripper",), "gripper", 1, 1)
    run = dataclasses.replace(RUN, data=DataConfig(robot=robot, num_workers=0))
    with loader(run=run) as batches:
        batch = next(batches)
    assert batch.actions.shape == (8, 5, 6)
    assert not batch.observation.image_masks.any()


def main_that_dies(folder: Path) -> None:
    with loader(num_workers=2) as batches:
        next(batches)
        assert batches.maker.progress is not None
        while not batches.maker.progress[:, 0].all():
            time.sleep(0.01)
        (folder / "pids").write_text(" ".join(map(str, batches.maker.progress[:, 0].tolist())))
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_do_not_outlive_a_main_process_that_is_killed(tmp_path: Path) -> None:
    main = multiprocessing.get_context("forkserver").Process(target=main_that_dies, args=(tmp_path,))
    main.start()
    main.join(60)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert gone(pids, seconds=10)


def test_a_first_sigterm_does_not_end_a_worker_but_closing_does() -> None:
    with loader(num_workers=1) as batches:
        next(batches)
        assert batches.maker.progress is not None
        pid = int(batches.maker.progress[0, 0])
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        for _ in range(6):
            next(batches)
    assert gone([pid], seconds=5)


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
