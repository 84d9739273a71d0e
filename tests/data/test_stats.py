"""Statistics equal openpi's to the bit, whatever the data, and the command writes and explains them."""

import dataclasses
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from make_sets import CAMERAS, Spec, action_of, make_set, state_of
from rich.console import Console
from torch.utils.data import DataLoader

from piston.config.recipes import recipe
from piston.config.robots import ALOHA, LIBERO_EXTRA_DELTA, generic
from piston.config.schema import RobotConfig, RunConfig
from piston.data import stats as room
from piston.data.norm import KeyStats, load_norm_stats, normalize
from piston.data.stats import RunningStats, compute_norm_stats, findings, running_stats, stats_command, stats_table
from piston.data.units import robot_inputs

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "preprocess_transforms.npz"))
NAMES = ("mean", "std", "q01", "q99")


def assert_equal(stats: KeyStats, expected: dict[str, np.ndarray]) -> None:
    for name in NAMES:
        assert np.array_equal(getattr(stats, name), expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ragged_batches_equal_openpi(dtype: str) -> None:
    running, cuts = RunningStats(), GOLDEN["running/cuts"]
    for start, stop in itertools.pairwise(cuts):
        running.update(GOLDEN[f"running/{dtype}/data"][start:stop])
    assert_equal(running.statistics(), {name: GOLDEN[f"running/{dtype}/{name}"] for name in NAMES})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_chunk_batches_equal_openpi(dtype: str) -> None:
    running = RunningStats()
    for batch in GOLDEN[f"running/{dtype}/data"].reshape(20, 1, 30, 6):
        running.update(batch)
    assert_equal(running.statistics(), {name: GOLDEN[f"running3d/{dtype}/{name}"] for name in NAMES})


def plain_statistics(batches: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The same, spelled out dimension by dimension and batch by batch, independently."""
    dims = batches[0].shape[-1]
    result = {name: np.zeros(dims) for name in NAMES}
    flat = [batch.reshape(-1, dims) for batch in batches]
    count = sum(map(len, flat))
    low, high = flat[0].min(0), flat[0].max(0)
    edges = [np.linspace(float(a) - 1e-10, float(b) + 1e-10, 5001) for a, b in zip(low, high, strict=True)]
    counts = [np.zeros(5000) for _ in range(dims)]
    mean = square = None
    seen = 0
    for batch in flat:
        if (batch.min(0) < low).any() or (batch.max(0) > high).any():
            low, high = np.minimum(low, batch.min(0)), np.maximum(high, batch.max(0))
            for d in range(dims):
                new = np.linspace(float(low[d]), float(high[d]), 5001)
                moved = np.zeros(5000)
                for left, n in zip(edges[d][:-1], counts[d], strict=True):
                    if n and new[0] <= left <= new[-1]:
                        moved[min(int(np.searchsorted(new, left, side="right")) - 1, 4999)] += n
                edges[d], counts[d] = new, moved
        seen += len(batch)
        for d in range(dims):
            bins = np.searchsorted(edges[d], batch[:, d].astype(float), side="right") - 1
            np.add.at(counts[d], np.minimum(bins, 4999), 1)
        first = mean is None or square is None
        mean = batch.mean(0) if first else mean + (batch.mean(0) - mean) * (len(batch) / seen)
        square = (batch**2).mean(0) if first else square + ((batch**2).mean(0) - square) * (len(batch) / seen)
    assert mean is not None
    assert square is not None
    result["mean"], result["std"] = mean, np.sqrt(np.maximum(0, square - mean**2))
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        for d in range(dims):
            result[name][d] = edges[d][np.searchsorted(np.cumsum(counts[d]), q * count)]
    return result


@given(
    batches=st.lists(
        hnp.arrays(np.float32, (6, 2), elements=st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5, -7.25, 1e6])),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_stream_equals_the_plain_way(batches: list[np.ndarray]) -> None:
    """Few values, so minima, constants, growth and ties happen all the time."""
    running = RunningStats()
    for batch in batches:
        running.update(batch)
    assert_equal(running.statistics(), plain_statistics(batches))


def test_counting_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(50, 3)) * (1 + i % 5)).astype(np.float32) for i in range(40)]
    running = RunningStats()
    for batch in batches:
        running.update(batch)
        running._count_pending()
    together = RunningStats()
    for batch in batches:
        together.update(batch)
    assert_equal(together.statistics(), {name: getattr(running.statistics(), name) for name in NAMES})


def test_minimum_of_the_first_batch_is_lost_when_it_grows() -> None:
    """The reference's quirk, written down: half of all samples are at −1, and q01 does not say so."""
    running = RunningStats()
    running.update(np.array([[-1.0], [-1.0], [0.5], [0.6]]))
    running.update(np.array([[0.7], [0.8]]))
    assert running.statistics().quantiles()[0][0] > 0.4


def test_streams_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="statistics of 0 samples"):
        RunningStats().statistics()
    running = RunningStats()
    running.update(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="statistics of 1 samples"):
        running.statistics()
    with pytest.raises(ValueError, match="3 dimensions, the ones before had 2"):
        running.update(np.zeros((1, 3)))


# --- over a data set -------------------------------------------------------------------------------------------------


class Table:
    """Episodes in memory, of the given lengths."""

    def __init__(self, columns: dict[str, np.ndarray], lengths: tuple[int, ...]) -> None:
        self.columns = columns
        self.num_frames = sum(lengths)
        self.episode_starts = np.cumsum([0, *lengths])
        self.episode_index = np.arange(len(lengths)) * 10  # the data set's own numbers

    def column(self, key: str) -> np.ndarray:
        return self.columns[key]


def table_for(robot: RobotConfig, lengths: tuple[int, ...] = (11, 3, 26, 1)) -> Table:
    rng = np.random.default_rng(0)
    widths = dict.fromkeys(robot.state_keys, robot.state_dim // len(robot.state_keys))
    columns = {key: rng.normal(size=(sum(lengths), width)).astype(np.float32) for key, width in widths.items()}
    return Table(
        columns | {robot.action_key: rng.normal(size=(sum(lengths), robot.action_dim)).astype(np.float32)}, lengths
    )


def run_for(robot: RobotConfig, *, pi05: bool = True, batch_size: int = 4) -> RunConfig:
    run = recipe("debug_pi05" if pi05 else "debug")
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, action_horizon=5),
        data=dataclasses.replace(run.data, robot=robot),
        train=dataclasses.replace(run.train, batch_size=batch_size),
    )


def sample_by_sample(table: Table, robot: RobotConfig, order: list[int], batch: int) -> dict[str, list[np.ndarray]]:
    """State and clamped action chunks of one frame after the other, through the sample transforms, in batches."""
    out: dict[str, list[np.ndarray]] = {"state": [], "actions": []}
    for row in order:
        end = next(int(stop) for stop in table.episode_starts[1:] if row < stop)
        chunk = table.columns[robot.action_key][[min(row + step, end - 1) for step in range(5)]]
        state = np.concatenate([table.columns[key][row] for key in robot.state_keys])
        new_state, actions = robot_inputs(robot, state, chunk)
        assert actions is not None
        out["state"].append(new_state.astype(np.float32))
        out["actions"].append(actions.astype(np.float32))
    return {key: [np.stack(v[i : i + batch]) for i in range(0, len(v) - batch + 1, batch)] for key, v in out.items()}


TWO_COLUMNS = dataclasses.replace(
    generic(cameras={"base_0_rgb": "top"}, state_dim=8, action_dim=3), state_keys=("joints", "gripper")
)


@pytest.mark.parametrize("robot", [ALOHA, LIBERO_EXTRA_DELTA, TWO_COLUMNS], ids=lambda robot: robot.name)
def test_statistics_equal_sample_by_sample(robot: RobotConfig) -> None:
    table = table_for(robot)
    result = compute_norm_stats(table, run_for(robot), batch_size=4)
    batches = sample_by_sample(table, robot, list(range(40)), 4)  # 41 frames: the last one is left out
    for key in ("state", "actions"):
        expected = plain_statistics(batches[key])
        for name in NAMES:  # means of one big array may round another way than those of its pieces
            np.testing.assert_allclose(getattr(result[key], name), expected[name], rtol=1e-5, atol=1e-6)


def test_fewer_frames_are_openpis_random_ones() -> None:
    """Those of torch's own loader with seed 0: the first 20 of 41."""
    loader = DataLoader(
        range(41),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    order = [int(i) for batch in loader for i in batch][:20]
    table = table_for(TWO_COLUMNS)
    running = running_stats(table, run_for(TWO_COLUMNS), batch_size=4, max_frames=23)
    assert (running["state"].count, running["actions"].count) == (20, 100)
    batches = sample_by_sample(table, TWO_COLUMNS, order, 4)
    assert_equal(running["state"].statistics(), plain_statistics(batches["state"]))


def test_progress_ends_at_its_total() -> None:
    calls: list[tuple[int, int]] = []
    running_stats(table_for(ALOHA), run_for(ALOHA), batch_size=4, progress=lambda *done: calls.append(done))
    assert calls == [(4 * (i + 1), 40) for i in range(10)]


def test_data_sets_that_cannot_be_counted_are_errors() -> None:
    table, run = table_for(ALOHA), run_for(ALOHA)
    with pytest.raises(ValueError, match=r"41 frames, the batch size is 64"):
        compute_norm_stats(table, run, batch_size=64)
    with pytest.raises(ValueError, match="max_frames is 0"):
        compute_norm_stats(table, run, batch_size=4, max_frames=0)
    robot = generic(cameras={}, state_dim=7, action_dim=14)
    with pytest.raises(ValueError, match=r"14 numbers per frame, robot generic expects state_dim 7.*choose a recipe"):
        compute_norm_stats(table, run_for(robot), batch_size=4)
    table.columns["action"][13, 6] = np.nan
    with pytest.raises(ValueError, match=r"in 1 frames.*dimension 6 in frame 2 of episode 10.*piston data check"):
        compute_norm_stats(table, run, batch_size=4)


# --- the command -----------------------------------------------------------------------------------------------------


ROBOT = generic(cameras={"base_0_rgb": CAMERAS[0]}, state_dim=4, action_dim=4)


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_command_on_every_version(tmp_path: Path, version: str) -> None:
    root = make_set(tmp_path / "set", Spec(version=version, lengths=(12, 15, 4), images=True, table_episodes=(2, 1)))
    out, text = tmp_path / "norm_stats.json", io.StringIO()
    console = Console(file=text, width=160)
    assert stats_command(root, run_for(ROBOT), out, None, console) == 0
    columns = {
        name: np.stack([function(e, i) for e, n in enumerate((12, 15, 4)) for i in range(n)])
        for name, function in (("observation.state", state_of), ("action", action_of))
    }
    expected = compute_norm_stats(Table(columns, (12, 15, 4)), run_for(ROBOT), batch_size=4)
    for key, value in load_norm_stats(out).items():
        assert_equal(value, {name: getattr(expected[key], name) for name in NAMES})
    assert "28 of 31 frames, in batches of 4, 5 action steps each" in text.getvalue()
    assert str(out) in text.getvalue().replace("\n", "")


def test_command_saves_where_the_run_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_set(tmp_path / "set", Spec(lengths=(12,), images=True, table_episodes=(1,)))
    monkeypatch.chdir(tmp_path)
    stats_command(root, run_for(ROBOT), None, 8, Console(file=io.StringIO()))
    assert (tmp_path / "assets" / "debug_pi05" / "planar_arm" / "norm_stats.json").is_file()


def filled(*columns: list[float]) -> RunningStats:
    running = RunningStats()
    running.update(np.array(columns, np.float32).T)
    return running


def test_constant_and_narrow_dimensions_are_reported() -> None:
    varied = list(np.linspace(-1, 1, 1000))
    running = filled(varied, [0.5] * 1000, [0.0] * 998 + [1.0, 2.0])
    lines = findings("actions", running, use_quantiles=True)
    assert [line.split()[0] for line in lines] == ["actions[1]", "actions[2]"]
    assert "constant (0.5)" in lines[0]
    assert "q01" in lines[1]
    assert "from 0 to 2" in lines[1]
    narrow = findings("state", filled([0.0] * 9999 + [1.0]), use_quantiles=False)
    assert "std is 0.00999" in narrow[0]


def test_table_has_a_row_per_dimension_and_the_right_extremes() -> None:
    running = filled(list(np.linspace(-2, 1, 100)), list(np.linspace(0, 9, 100)))
    assert stats_table("state", running, use_quantiles=True).row_count == 2
    stats = running.statistics()
    ends = np.array([[-2.0, 0.0], [1.0, 9.0]])
    expected = np.abs(normalize(ends, stats, use_quantiles=True)).max(axis=0)
    np.testing.assert_allclose(room.extremes(running, use_quantiles=True), expected)
