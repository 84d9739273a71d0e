"""Robot units and deltas: golden deltas, ALOHA's formulas, and every inverse."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.config.robots import ALOHA, ALOHA_SIM, LIBERO_EXTRA_DELTA, ROBOTS
from piston.config.schema import RobotConfig
from piston.data.units import (
    absolute_actions,
    aloha_actions_from_pi,
    aloha_actions_to_pi,
    aloha_state_to_pi,
    delta_actions,
    delta_dims,
    robot_inputs,
    robot_outputs,
)

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "preprocess_transforms.npz"))
MASKS = {0: (6, -1), 1: (3,), 2: (6, -1, 6, -1)}


def floats(shape: tuple[int, ...], limit: float = 3.0) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, shape, elements=st.floats(-limit, limit, width=32))


@pytest.mark.parametrize("case", MASKS)
def test_deltas_equal_openpi(case: int) -> None:
    golden = {name.split("/")[1]: value for name, value in GOLDEN.items() if name.startswith(f"delta{case}/")}
    mask = delta_dims(MASKS[case])
    assert np.array_equal(mask, golden["mask"])
    before = golden["actions"].copy()
    delta = delta_actions(golden["actions"], golden["state"], mask)
    assert np.array_equal(delta, golden["delta_out"])
    assert delta.dtype == golden["delta_out"].dtype
    assert np.array_equal(golden["actions"], before)
    absolute = absolute_actions(golden["actions"], golden["state"], mask)  # the file's way: of the same actions
    assert np.array_equal(absolute, golden["absolute_out"])
    np.testing.assert_allclose(absolute_actions(delta, golden["state"], mask), before, rtol=0, atol=5e-7)


def test_no_mask_changes_nothing() -> None:
    actions = np.ones((2, 3), np.float32)
    assert delta_dims(()).shape == (0,)
    assert delta_actions(actions, np.ones(3, np.float32), delta_dims(())) is actions


def test_aloha_state_by_hand() -> None:
    state = np.arange(1, 15, dtype=np.float32) / 10
    state[[6, 13]] = 0.0, 1.0
    result = aloha_state_to_pi(state)
    assert result.dtype == np.float64
    expected = state * [1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1]
    for dim, distance in ((6, 0.01844), (13, 0.05800)):
        angle = math.asin(max(-1.0, min(1.0, (0.022**2 + distance**2 - 0.036**2) / (2 * 0.022 * distance))))
        expected[dim] = (angle - 0.5476) / (1.6296 - 0.5476)
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_aloha_actions_by_hand() -> None:
    actions = np.full((1, 14), 0.5, np.float32)
    result = aloha_actions_to_pi(actions)
    assert result[0, 1] == -0.5
    np.testing.assert_allclose(result[0, [6, 13]], 0.5 * (1.4910 + 0.6213) - 0.6213 - 0.5476, rtol=1e-12)
    back = aloha_actions_from_pi(np.zeros((1, 14)))
    np.testing.assert_allclose(back[0, 6], (0.5476 + 0.6213) / (1.4910 + 0.6213), rtol=1e-12)


@given(floats((4, 14)))
def test_aloha_actions_come_back(actions: np.ndarray) -> None:
    np.testing.assert_allclose(aloha_actions_from_pi(aloha_actions_to_pi(actions)), actions, rtol=1e-12, atol=1e-12)


@given(floats((14,), limit=1e3))
def test_aloha_state_is_finite_whatever_the_gripper_says(state: np.ndarray) -> None:
    if (state[[6, 13]] == np.float32(-0.01844 / (0.058 - 0.01844))).any():
        return  # finger distance 0
    assert np.isfinite(aloha_state_to_pi(state)).all()


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=lambda robot: robot.name)
@given(data=st.data())
def test_robot_actions_come_back(robot: RobotConfig, data: st.DataObject) -> None:
    state = data.draw(floats((robot.state_dim,)))
    actions = data.draw(floats((5, robot.action_dim)))
    state_in, actions_in = robot_inputs(robot, state, actions)
    assert actions_in is not None
    wide = np.concatenate([actions_in.astype(np.float64), np.full((5, 32 - robot.action_dim), 9.0)], axis=1)
    np.testing.assert_allclose(robot_outputs(robot, state_in, wide), actions, rtol=1e-6, atol=1e-6)


def test_many_samples_are_one_call() -> None:
    rng = np.random.default_rng(0)
    state, actions = rng.random((6, 14), np.float32), rng.random((6, 4, 14), np.float32)
    together = robot_inputs(ALOHA, state, actions)
    for i in range(6):
        alone = robot_inputs(ALOHA, state[i], actions[i])
        for a, b in zip(together, alone, strict=True):
            assert a is not None
            assert b is not None
            assert np.array_equal(a[i], b)


def test_aloha_deltas_are_of_converted_joints() -> None:
    state, actions = np.full(14, 0.3, np.float32), np.full((2, 14), 0.5, np.float32)
    _, with_deltas = robot_inputs(ALOHA, state, actions)
    _, without = robot_inputs(ALOHA_SIM, state, actions)
    assert with_deltas is not None
    assert without is not None
    np.testing.assert_allclose(with_deltas[:, 0], 0.2, atol=1e-7)
    np.testing.assert_allclose(with_deltas[:, 1], -0.2, atol=1e-7)  # sign flipped before the difference
    np.testing.assert_array_equal(with_deltas[:, [6, 13]], without[:, [6, 13]])  # grippers stay absolute


def test_state_alone() -> None:
    state, actions = robot_inputs(LIBERO_EXTRA_DELTA, np.ones(8, np.float32), None)
    assert actions is None
    assert state.tolist() == [1.0] * 8
