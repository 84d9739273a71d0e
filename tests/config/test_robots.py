"""Robots: openpi's columns and dimensions, and entries that cannot work are refused when they are made."""

import pytest

from piston.config.robots import (
    ALOHA,
    ALOHA_SIM,
    DROID,
    DROID_JOINT_POSITION,
    LIBERO,
    LIBERO_EXTRA_DELTA,
    PLANAR_ARM,
    ROBOTS,
    generic,
)
from piston.config.schema import CAMERAS, RobotConfig
from piston.demo.planar_arm import ACTION_NAMES, CAMERA_NAMES, STATE_NAMES

BASE, LEFT, RIGHT = CAMERAS


@pytest.mark.parametrize(
    ("robot", "cameras", "state_keys", "action_key", "dims", "delta_mask"),
    [
        (LIBERO, {BASE: "image", LEFT: "wrist_image"}, ("state",), "actions", (8, 7), ()),
        (LIBERO_EXTRA_DELTA, {BASE: "image", LEFT: "wrist_image"}, ("state",), "actions", (8, 7), (6, -1)),
        (
            DROID,
            {BASE: "exterior_image_1_left", LEFT: "wrist_image_left"},
            ("joint_position", "gripper_position"),
            "actions",
            (8, 8),
            (),
        ),
        (DROID_JOINT_POSITION, DROID.cameras, DROID.state_keys, "actions", (8, 8), (7, -1)),
        (
            ALOHA,
            {
                BASE: "observation.images.cam_high",
                LEFT: "observation.images.cam_left_wrist",
                RIGHT: "observation.images.cam_right_wrist",
            },
            ("observation.state",),
            "action",
            (14, 14),
            (6, -1, 6, -1),
        ),
        (ALOHA_SIM, {BASE: "observation.images.top"}, ("observation.state",), "action", (14, 14), ()),
    ],
    ids=lambda value: value.name if isinstance(value, RobotConfig) else "",
)
def test_entries_are_openpis(
    robot: RobotConfig,
    cameras: dict[str, str],
    state_keys: tuple[str, ...],
    action_key: str,
    dims: tuple[int, int],
    delta_mask: tuple[int, ...],
) -> None:
    assert robot.cameras == cameras
    assert (robot.state_keys, robot.action_key) == (state_keys, action_key)
    assert (robot.state_dim, robot.action_dim) == dims
    assert robot.delta_mask == delta_mask
    assert robot.adapt_to_pi == robot.name.startswith("aloha")


def test_planar_arm_reads_what_the_demo_records() -> None:
    assert PLANAR_ARM.cameras == dict(
        zip((BASE, LEFT), (f"observation.images.{name}" for name in CAMERA_NAMES), strict=True)
    )
    assert (PLANAR_ARM.state_dim, PLANAR_ARM.action_dim) == (len(STATE_NAMES), len(ACTION_NAMES))


def test_names_are_keys() -> None:
    assert all(name == robot.name for name, robot in ROBOTS.items())


def test_generic_reads_what_lerobot_records() -> None:
    robot = generic(cameras={BASE: "observation.images.front"}, state_dim=6, action_dim=6, delta_mask=(5, -1))
    assert (robot.state_keys, robot.action_key, robot.delta_mask) == (("observation.state",), "action", (5, -1))
    assert not robot.adapt_to_pi


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta_mask": (6, -2), "action_dim": 7}, "covers 8 dimensions"),
        ({"delta_mask": (-2, 3), "state_dim": 4, "action_dim": 7}, "up to 5, the state has 4"),
        ({"delta_mask": (7,), "state_dim": 6, "action_dim": 7}, "up to 7, the state has 6"),
    ],
)
def test_masks_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generic(**{"cameras": {}, "state_dim": 8, "action_dim": 8, **changes})


def test_aloha_units_are_for_two_arms() -> None:
    with pytest.raises(ValueError, match="adapt_to_pi is on for 7 state and 7 action dimensions"):
        RobotConfig("one_arm", {}, ("observation.state",), "action", 7, 7, adapt_to_pi=True)
