"""One entry per robot or data set: cameras, state, actions, and which actions are relative to the state.

Camera slots are the model's; column names are those of the LeRobot data sets that openpi's configurations read
(openpi training/config.py, policies/*_policy.py). Units and signs of every robot: CONVENTIONS.md.
"""

import dataclasses

from piston.config.schema import RobotConfig

# The hand of a Panda: state x y z, axis-angle, two finger joints. Actions are deltas already, in [-1, 1], gripper last.
LIBERO = RobotConfig(
    name="libero",
    cameras={"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"},
    state_keys=("state",),
    action_key="actions",
    state_dim=8,
    action_dim=7,
)

# openpi's π0 LIBERO checkpoints subtract the state from these deltas once more; π0.5's do not.
LIBERO_EXTRA_DELTA = dataclasses.replace(LIBERO, name="libero_extra_delta", delta_mask=(6, -1))

# Joint velocities and an absolute gripper, so there is nothing to subtract. The second exterior camera stays unread.
DROID = RobotConfig(
    name="droid",
    cameras={"base_0_rgb": "exterior_image_1_left", "left_wrist_0_rgb": "wrist_image_left"},
    state_keys=("joint_position", "gripper_position"),
    action_key="actions",
    state_dim=8,
    action_dim=8,
)

# openpi's training on all of DROID has absolute joint positions as actions, which become relative.
DROID_JOINT_POSITION = dataclasses.replace(DROID, name="droid_joint_position", delta_mask=(7, -1))

# Two arms of six joints and a gripper, absolute joint targets; joints become relative, grippers stay absolute.
ALOHA = RobotConfig(
    name="aloha",
    cameras={
        "base_0_rgb": "observation.images.cam_high",
        "left_wrist_0_rgb": "observation.images.cam_left_wrist",
        "right_wrist_0_rgb": "observation.images.cam_right_wrist",
    },
    state_keys=("observation.state",),
    action_key="action",
    state_dim=14,
    action_dim=14,
    delta_mask=(6, -1, 6, -1),
    adapt_to_pi=True,
)

# gym-aloha data sets: one camera from above, absolute actions as they are.
ALOHA_SIM = dataclasses.replace(
    ALOHA, name="aloha_sim", cameras={"base_0_rgb": "observation.images.top"}, delta_mask=()
)

# The data set of `piston data demo`: a planar arm that moves its hand by velocities.
PLANAR_ARM = RobotConfig(
    name="planar_arm",
    cameras={"base_0_rgb": "observation.images.base", "left_wrist_0_rgb": "observation.images.wrist"},
    state_keys=("observation.state",),
    action_key="action",
    state_dim=5,
    action_dim=2,
)

ROBOTS: dict[str, RobotConfig] = {
    robot.name: robot
    for robot in (LIBERO, LIBERO_EXTRA_DELTA, DROID, DROID_JOINT_POSITION, ALOHA, ALOHA_SIM, PLANAR_ARM)
}


def generic(
    *,
    cameras: dict[str, str],
    state_dim: int,
    action_dim: int,
    state_keys: tuple[str, ...] = ("observation.state",),
    action_key: str = "action",
    delta_mask: tuple[int, ...] = (),
    name: str = "generic",
) -> RobotConfig:
    """A robot of your own, read as LeRobot records it: no units or signs are changed.

    `cameras` maps model slots to image columns; a slot left out is black and masked. `delta_mask` is for absolute
    actions only: (6, -1) subtracts the state from six dimensions and leaves one alone.
    """
    return RobotConfig(
        name=name,
        cameras=cameras,
        state_keys=state_keys,
        action_key=action_key,
        state_dim=state_dim,
        action_dim=action_dim,
        delta_mask=delta_mask,
    )
