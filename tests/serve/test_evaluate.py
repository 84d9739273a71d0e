import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_policies import Oracle
from PIL import Image
from rich.console import Console

from piston.config.recipes import recipe
from piston.config.schema import RunConfig
from piston.demo.planar_arm import COLOURS, PROMPTS, ArmConfig, scene
from piston.demo.record import DemoConfig, build
from piston.serve.evaluate import (
    COMPARISONS,
    EVALUATION_STREAM,
    Condition,
    check_robot,
    evaluate_command,
    evaluation_scenes,
    find_checkpoint,
    open_loop,
    roll_out,
    rollout_table,
    wilson,
)
from piston.serve.policy import Policy, RawSample

ARM = ArmConfig()


@pytest.mark.parametrize(("successes", "trials"), [(8, 10), (3, 7), (50, 100), (1, 200), (0, 100), (100, 100)])
def test_wilson_bounds_are_the_rates_that_are_just_not_rejected(successes: int, trials: int):
    """At either bound p, |successes/trials − p| is 1.96 standard errors of p; nothing at 0 and 1."""
    low, high = wilson(successes, trials)
    assert low <= successes / trials <= high
    assert (low == 0.0) == (successes == 0)
    assert (high == 1.0) == (successes == trials)
    for bound in {low, high} - {0.0, 1.0}:
        distance = abs(successes / trials - bound)
        assert distance == pytest.approx(1.959964 * (bound * (1 - bound) / trials) ** 0.5, rel=1e-5)


def test_nothing_tried_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


def test_evaluation_scenes_are_never_recorded_ones():
    scenes = evaluation_scenes(ARM, 6, 0)
    assert [s.target for s in scenes] == [0, 1, 2, 0, 1, 2]
    assert DemoConfig().seed < EVALUATION_STREAM
    recorded = scene(ARM, DemoConfig().seed, 0)
    assert not np.allclose(scenes[0].blocks_K2, recorded.blocks_K2)


def test_who_knows_the_way_arrives_and_every_condition_counts_its_own(run: RunConfig):
    scenes = evaluation_scenes(ARM, 30, 1)
    oracle = Oracle(run, ARM, scenes)
    rollout = roll_out(oracle, ARM, scenes, execute=3)
    assert rollout.reached_N.all()
    row = rollout.row()
    assert (row["successes"], row["episodes"], row["rate"], row["high"]) == (30, 30, 1.0, 1.0)
    assert [task["episodes"] for task in row["tasks"].values()] == [10, 10, 10]
    assert rollout.hand_TN2.shape == (ARM.max_steps + 1, 30, 2)
    np.testing.assert_array_equal(rollout.hand_TN2[0], [s.hand_2 for s in scenes])

    other = roll_out(oracle, ARM, scenes, Condition("told another", other_prompt=True), execute=3)
    assert not other.reached_N.any()
    assert other.held_other_N.all()
    assert other.row()["obeyed_the_other_prompt"]["rate"] == 1.0
    assert oracle.seen[0]["prompt"] == PROMPTS[1]

    blind = roll_out(oracle, ARM, scenes, Condition("no base", hide="base"), execute=3)
    assert blind.successes == 0
    assert list(oracle.seen[0]["images"]) == ["left_wrist_0_rgb"]
    table = rollout_table([rollout, other, blind])
    assert table.row_count == 4
    assert table.columns[1].header == "success"


def test_the_last_chunk_is_cut_at_the_end_of_the_episode(run: RunConfig):
    scenes = evaluation_scenes(ARM, 2, 1)
    execute = next(n for n in range(2, run.model.action_horizon + 1) if ARM.max_steps % n)
    steps: list[tuple[int, int]] = []
    rollout = roll_out(
        Oracle(run, ARM, scenes), ARM, scenes, execute=execute, progress=lambda *done: steps.append(done)
    )
    assert len(rollout.hand_TN2) == ARM.max_steps + 1
    assert steps[-1] == (ARM.max_steps, ARM.max_steps)


@pytest.mark.parametrize("execute", [0, 99])
def test_more_actions_than_a_chunk_holds_are_refused(run: RunConfig, execute: int):
    scenes = evaluation_scenes(ARM, 1, 1)
    with pytest.raises(ValueError, match="--execute"):
        roll_out(Oracle(run, ARM, scenes), ARM, scenes, execute=execute)


def test_rollouts_are_deterministic_and_the_seed_matters(checkpoint: Path):
    policy = Policy.from_checkpoint(checkpoint, num_steps=2)
    scenes = evaluation_scenes(ARM, 3, 0)
    first, again, other = (roll_out(policy, ARM, scenes, execute=5, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.hand_TN2, again.hand_TN2)
    assert not np.array_equal(first.hand_TN2, other.hand_TN2)


def test_other_robots_are_sent_to_open_loop():
    with pytest.raises(ValueError, match="--open-loop"):
        check_robot(recipe("pi05_libero"))


def test_newest_checkpoint_of_an_experiment(checkpoint: Path, tmp_path: Path):
    assert find_checkpoint(checkpoint) == checkpoint
    assert find_checkpoint(checkpoint.parent) == checkpoint
    with pytest.raises(ValueError, match="cannot be used"):
        find_checkpoint(tmp_path)


def test_command_writes_table_json_and_picture(checkpoint: Path, tmp_path: Path):
    console = Console(record=True, width=200)
    result, picture = tmp_path / "result.json", tmp_path / "episodes.png"
    args = [str(checkpoint.parent), "--sim", "planar-arm", "--episodes", "3", "--steps", "1", "--execute", "5"]
    code = evaluate_command(
        [*args, "--compare", "--json", str(result), "--picture", str(picture)], "piston eval", console
    )
    assert code == 0
    report = json.loads(result.read_text())
    assert report["checkpoint"] == str(checkpoint)
    assert [row["condition"] for row in report["conditions"]] == [condition.name for condition in COMPARISONS]
    assert all(set(row["tasks"]) == set(PROMPTS) and row["episodes"] == 3 for row in report["conditions"])
    shown = console.export_text()
    assert all(condition.name in shown for condition in COMPARISONS)
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
        colours = {tuple(pixel) for pixel in np.asarray(drawn.convert("RGB")).reshape(-1, 3)}
    assert all(colour in colours for colour in COLOURS.values())


class Parrot(Policy):
    """Answers with the recorded chunk, off by a constant in one dimension."""

    def __init__(self, run: RunConfig, chunks: np.ndarray, off: float) -> None:
        self.run, self.chunks, self.off = run, chunks, off

    def infer_batch(
        self, samples: Sequence[RawSample], *, seed: int = 0, numbers: Sequence[int] | None = None
    ) -> np.ndarray:
        assert numbers is not None
        assert len(samples) == len(numbers)
        return self.chunks[list(numbers)] + np.array([0.0, self.off], np.float32)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("open_loop") / "data"
    build(root, DemoConfig(episodes=4))
    return root


def test_open_loop_measures_each_dimension(run: RunConfig, recording: Path):
    from piston.data.lerobot import open_dataset

    ds = open_dataset(recording)
    rows = np.stack([ds.chunk_rows(row, run.model.action_horizon) for row in range(ds.num_frames)])
    result = open_loop(Parrot(run, ds.column("action")[rows], off=0.25), recording, max_rows=30, batch=8)
    assert result.names == ["hand_vx", "hand_vy"]
    assert (result.rows, result.episodes, result.held_out) == (30, 4, False)
    np.testing.assert_allclose(result.mean_abs_D, [0.0, 0.25], atol=1e-6)
    np.testing.assert_allclose(result.rms_D, [0.0, 0.25], atol=1e-6)
    asked = np.unique(np.linspace(0, ds.num_frames - 1, 30).astype(int))
    np.testing.assert_allclose(result.std_D, ds.column("action")[rows[asked]].reshape(-1, 2).std(0), rtol=1e-5)


def test_open_loop_command(checkpoint: Path, recording: Path, tmp_path: Path):
    console = Console(record=True, width=160)
    out = tmp_path / "open.json"
    args = [str(checkpoint), "--open-loop", str(recording), "--max-rows", "12", "--steps", "1", "--json", str(out)]
    assert evaluate_command(args, "piston eval", console) == 0
    report = json.loads(out.read_text())
    assert [dim["name"] for dim in report["dimensions"]] == ["hand_vx", "hand_vy"]
    assert report["rows"] == 12
    assert "none of them held out" in console.export_text()


@pytest.mark.parametrize("given", [[], ["--sim", "planar-arm", "--open-loop", "x"]])
def test_one_kind_of_evaluation_at_a_time(checkpoint: Path, given: list[str]):
    with pytest.raises(ValueError, match="--sim and --open-loop"):
        evaluate_command([str(checkpoint), *given], "piston eval", Console())
