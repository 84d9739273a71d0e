"""A robot's own units and signs ↔ π's, and absolute ↔ relative actions: before normalisation, and after it is undone.

Arrays are changed along their last axis, so one sample and a whole data set are the same call. Columns are float32;
ALOHA's arithmetic is float64 and deltas keep the dtype they get, as in the reference (openpi policies/aloha_policy.py,
transforms.py). Conventions of every robot: CONVENTIONS.md.
"""

import numpy as np
from jaxtyping import Bool, Float

from piston.config.schema import RobotConfig

Array = Float[np.ndarray, "*batch d"]

ALOHA_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)  # π's runtime turns shoulder and elbow the other way
ALOHA_GRIPPERS = (6, 13)
GRIPPER_STROKE_M = (0.01844, 0.05800)  # finger distance of ALOHA's 0 and 1, metres
GRIPPER_ANGLE_RAD = (0.5476, 1.6296)  # motor angle of π's 0 and 1, radians
GRIPPER_COMMAND_RAD = (-0.6213, 1.4910)  # motor angle of ALOHA's command 0 and 1, radians
ARM_M, HORN_M = 0.036, 0.022  # the linkage between motor and finger


def aloha_state_to_pi(state: Array) -> Array:
    """ALOHA's joint signs and linear gripper → π's signs and motor angle; the linkage's triangle is clipped to one."""
    state = ALOHA_SIGNS * state
    grippers = state[..., ALOHA_GRIPPERS] * (GRIPPER_STROKE_M[1] - GRIPPER_STROKE_M[0]) + GRIPPER_STROKE_M[0]
    sine = (HORN_M**2 + grippers**2 - ARM_M**2) / (2 * HORN_M * grippers)
    angle = np.arcsin(np.clip(sine, -1.0, 1.0))
    state[..., ALOHA_GRIPPERS] = (angle - GRIPPER_ANGLE_RAD[0]) / (GRIPPER_ANGLE_RAD[1] - GRIPPER_ANGLE_RAD[0])
    return state


def aloha_actions_to_pi(actions: Array) -> Array:
    """ALOHA's commands → π's: signs, and the gripper's command as a motor angle from π's zero, in radians."""
    actions = ALOHA_SIGNS * actions
    command = actions[..., ALOHA_GRIPPERS] * (GRIPPER_COMMAND_RAD[1] - GRIPPER_COMMAND_RAD[0]) + GRIPPER_COMMAND_RAD[0]
    actions[..., ALOHA_GRIPPERS] = command - GRIPPER_ANGLE_RAD[0]
    return actions


def aloha_actions_from_pi(actions: Array) -> Array:
    """The inverse of `aloha_actions_to_pi`."""
    actions = ALOHA_SIGNS * actions
    angle = actions[..., ALOHA_GRIPPERS] + GRIPPER_ANGLE_RAD[0]
    actions[..., ALOHA_GRIPPERS] = (angle - GRIPPER_COMMAND_RAD[0]) / (GRIPPER_COMMAND_RAD[1] - GRIPPER_COMMAND_RAD[0])
    return actions


def delta_dims(delta_mask: tuple[int, ...]) -> Bool[np.ndarray, "d"]:
    """(6, -1) → six True, one False."""
    return np.repeat([n > 0 for n in delta_mask], [abs(n) for n in delta_mask]).astype(bool)


def delta_actions(
    actions: Float[np.ndarray, "*batch A d"], state: Float[np.ndarray, "*batch s"], mask: Bool[np.ndarray, "m"]
) -> Float[np.ndarray, "*batch A d"]:
    """Subtracts the state from the masked dimensions of every step; the chunk's first state serves all its steps."""
    return _shifted(actions, state, mask, -1)


def absolute_actions(
    actions: Float[np.ndarray, "*batch A d"], state: Float[np.ndarray, "*batch s"], mask: Bool[np.ndarray, "m"]
) -> Float[np.ndarray, "*batch A d"]:
    """The inverse of `delta_actions`."""
    return _shifted(actions, state, mask, 1)


def _shifted(actions: np.ndarray, state: np.ndarray, mask: np.ndarray, sign: int) -> np.ndarray:
    if not mask.any():
        return actions
    dims = len(mask)
    shifted = actions.astype(np.result_type(actions, state))  # a copy
    shifted[..., :dims] += sign * np.where(mask, state[..., :dims], 0)[..., None, :]
    return shifted


def robot_inputs(
    robot: RobotConfig, state: Float[np.ndarray, "*batch s"], actions: Float[np.ndarray, "*batch A d"] | None
) -> tuple[Float[np.ndarray, "*batch s"], Float[np.ndarray, "*batch A d"] | None]:
    """State and actions as they are normalised, and as statistics are computed: π's units, deltas where asked."""
    if robot.adapt_to_pi:
        state = aloha_state_to_pi(state)
        actions = None if actions is None else aloha_actions_to_pi(actions)
    if actions is not None:
        actions = delta_actions(actions, state, delta_dims(robot.delta_mask))
    return state, actions


def robot_outputs(
    robot: RobotConfig, state: Float[np.ndarray, "*batch s"], actions: Float[np.ndarray, "*batch A d"]
) -> Float[np.ndarray, "*batch A robot"]:
    """The inverse of `robot_inputs` for actions, given the same state as it came out; padded dimensions are dropped."""
    actions = absolute_actions(actions, state, delta_dims(robot.delta_mask))[..., : robot.action_dim]
    return aloha_actions_from_pi(actions) if robot.adapt_to_pi else actions
