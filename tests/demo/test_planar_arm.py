import dataclasses

import numpy as np
import pytest

from piston.demo.expert import ExpertConfig, demonstrate, expert_velocity
from piston.demo.planar_arm import (
    BASE_XY,
    COLOURS,
    LINK_LENGTHS,
    PROMPTS,
    ArmConfig,
    PlanarArms,
    forward_kinematics,
    inverse_kinematics,
    render,
    scene,
)

ARM = ArmConfig()


def whole_table(per_side: int = 21) -> np.ndarray:
    axis = np.linspace(0.0, 1.0, per_side)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def test_inverse_kinematics_reach_the_whole_table():
    hand_N2 = whole_table()
    np.testing.assert_allclose(forward_kinematics(inverse_kinematics(hand_N2)), hand_N2, atol=1e-12)


def test_links_have_their_lengths_and_the_hand_is_never_turned():
    hand_N2 = whole_table()
    joints_N3 = inverse_kinematics(hand_N2)
    shoulder_N = joints_N3[:, 0]
    elbow_N2 = np.array(BASE_XY) + LINK_LENGTHS[0] * np.stack([np.cos(shoulder_N), np.sin(shoulder_N)], axis=1)
    np.testing.assert_allclose(np.linalg.norm(hand_N2 - elbow_N2, axis=1), LINK_LENGTHS[1], atol=1e-12)
    np.testing.assert_allclose(joints_N3.sum(axis=1), np.pi / 2, atol=1e-12)


def test_scenes_are_pure_functions_and_keep_their_distances():
    scenes = [scene(ARM, 3, n) for n in range(60)]
    for n, one in enumerate(scenes):
        again = scene(ARM, 3, n)
        np.testing.assert_array_equal(one.blocks_K2, again.blocks_K2)
        np.testing.assert_array_equal(one.hand_2, again.hand_2)
        assert one.target == n % len(COLOURS)
        assert one.prompt == PROMPTS[one.target]
        gaps = np.linalg.norm(one.blocks_K2[:, None] - one.blocks_K2[None], axis=-1)[np.triu_indices(len(COLOURS), 1)]
        assert gaps.min() >= ARM.block_separation
        assert (one.blocks_K2 >= ARM.block_low).all()
        assert (one.blocks_K2 <= ARM.block_high).all()
        assert np.abs(one.hand_2 - np.array(ARM.home_xy)).max() <= ARM.home_spread
    assert not np.allclose(scenes[0].blocks_K2, scene(ARM, 4, 0).blocks_K2)


def test_a_step_moves_by_velocity_over_fps_and_no_faster_than_the_limit():
    arms = PlanarArms(ARM, [scene(ARM, 0, n) for n in range(2)])
    arms.hand_N2 = np.full((2, 2), 0.5)
    limit = ARM.max_speed
    arms.step(np.array([[0.3 * limit, -0.4 * limit], [30.0 * limit, 40.0 * limit]]))
    expected = 0.5 + np.array([[0.3, -0.4], [0.6, 0.8]]) * limit / ARM.fps
    np.testing.assert_allclose(arms.hand_N2, expected, atol=1e-12)
    for _ in range(100):
        arms.step(np.full((2, 2), 10.0))
    np.testing.assert_array_equal(arms.hand_N2, 1.0)  # the table's edge stops it


def test_reaching_means_holding_still_over_the_asked_block():
    arms = PlanarArms(ARM, [scene(ARM, 0, n) for n in range(3)])
    still = np.zeros((3, 2))
    arms.hand_N2 = arms.blocks_NK2[np.arange(3), arms.target_N] + np.array([0.9 * ARM.reach_tolerance, 0.0])
    arms.hand_N2[1] += np.array([0.2 * ARM.reach_tolerance, 0.0])  # just outside
    arms.hand_N2[2] = arms.blocks_NK2[2, (arms.target_N[2] + 1) % len(COLOURS)]  # over another block
    for _ in range(ARM.hold_steps - 1):
        assert not arms.step(still).any()
    assert arms.step(still).tolist() == [True, False, False]
    assert arms.nearest_block().tolist() == [0, 1, 0]
    arms.hand_N2 = np.zeros((3, 2))
    assert arms.step(still).tolist() == [True, False, False]  # what was reached stays reached


def test_passing_over_the_block_is_not_reaching_it():
    arms = PlanarArms(ARM, [scene(ARM, 0, 0)])
    target_2 = arms.blocks_NK2[0, arms.target_N[0]]
    for k in range(4 * ARM.hold_steps):
        arms.hand_N2 = target_2[None] + (0.0 if k % ARM.hold_steps else 2 * ARM.reach_tolerance)
        assert not arms.step(np.zeros((1, 2))).any()


def test_expert_reaches_the_asked_block_from_everywhere():
    scenes = [scene(ARM, 11, n) for n in range(300)]
    arms = PlanarArms(ARM, scenes)
    for _ in range(ARM.max_steps):
        arms.step(expert_velocity(arms, ExpertConfig()))
    assert arms.reached_N.mean() >= 0.99
    pushed, rng = PlanarArms(ARM, scenes), np.random.default_rng(0)
    for _ in range(ARM.max_steps):
        pushed.step(expert_velocity(pushed, ExpertConfig()), push_N2=rng.normal(0.0, 0.006, (len(scenes), 2)))
    assert pushed.reached_N.mean() >= 0.99


def test_the_same_numbers_give_the_same_pixels_alone_and_together():
    arms = PlanarArms(ARM, [scene(ARM, 0, n) for n in range(5)])
    together = arms.images()
    for camera, pictures in together.items():
        assert pictures.shape == (5, ARM.image_size, ARM.image_size, 3)
        assert pictures.dtype == np.uint8
        for n in range(5):
            alone = render(ARM, arms.hand_N2[n : n + 1], arms.blocks_NK2[n : n + 1])[camera][0]
            np.testing.assert_array_equal(alone, pictures[n])


def colour_share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float((np.abs(picture.astype(int) - np.array(colour)).max(axis=-1) <= 8).mean())


@pytest.fixture
def far_and_above() -> tuple[PlanarArms, PlanarArms]:
    """The hand far from every block, and right above the asked one."""
    base = scene(ARM, 0, 0)
    blocks_K2 = np.array([[0.75, 0.75], [0.3, 0.8], [0.8, 0.3]])
    far = dataclasses.replace(base, blocks_K2=blocks_K2, hand_2=np.array([0.1, 0.1]))
    above = dataclasses.replace(far, hand_2=blocks_K2[base.target])
    return PlanarArms(ARM, [far]), PlanarArms(ARM, [above])


def test_base_camera_finds_the_block_and_loses_it_under_the_hand(far_and_above: tuple[PlanarArms, PlanarArms]):
    far, above = far_and_above
    colour = list(COLOURS.values())[far.target_N[0]]
    assert colour_share(far.images()["base"][0], colour) > 0.5 * (ARM.block_side / ARM.base_view) ** 2
    assert colour_share(above.images()["base"][0], colour) < 0.35 * (ARM.block_side / ARM.base_view) ** 2


def test_wrist_camera_centres_the_block_and_cannot_find_it(far_and_above: tuple[PlanarArms, PlanarArms]):
    far, above = far_and_above
    colour = list(COLOURS.values())[far.target_N[0]]
    assert colour_share(far.images()["wrist"][0], colour) == 0.0
    seen = above.images()["wrist"][0]
    rows, columns = np.nonzero(np.abs(seen.astype(int) - np.array(colour)).max(axis=-1) <= 8)
    middle = (ARM.image_size - 1) / 2
    np.testing.assert_allclose([rows.mean(), columns.mean()], [middle, middle], atol=0.5)


def test_wrist_camera_shows_the_way_to_the_block():
    one = dataclasses.replace(scene(ARM, 0, 0), blocks_K2=np.array([[0.6, 0.55], [0.1, 0.9], [0.9, 0.1]]))
    arms = PlanarArms(ARM, [dataclasses.replace(one, hand_2=np.array([0.5, 0.5]))])
    seen = arms.images()["wrist"][0]
    rows, columns = np.nonzero(np.abs(seen.astype(int) - np.array(COLOURS["red"])).max(axis=-1) <= 8)
    middle = (ARM.image_size - 1) / 2
    assert columns.mean() > middle  # to the right is x up
    assert rows.mean() < middle  # upwards is y up


def test_state_is_joint_angles_then_hand():
    arms = PlanarArms(ARM, [scene(ARM, 0, n) for n in range(4)])
    state = arms.state()
    assert state.dtype == np.float32
    np.testing.assert_allclose(forward_kinematics(state[:, :3].astype(np.float64)), state[:, 3:], atol=1e-6)


def test_demonstrations_record_what_the_expert_did_from_where_it_was():
    config, expert = ARM, ExpertConfig()
    scenes = [scene(config, 5, n) for n in range(4)]
    shown = demonstrate(config, expert, scenes, seed=9)
    again = demonstrate(config, expert, scenes, seed=9)
    other = demonstrate(config, expert, scenes, seed=10)
    for one, same, different, start in zip(shown, again, other, scenes, strict=True):
        assert one.prompt == start.prompt
        assert one.state_TS.shape == (expert.steps, 5)
        assert one.action_TD.shape == (expert.steps, 2)
        np.testing.assert_array_equal(one.action_TD, same.action_TD)
        np.testing.assert_array_equal(one.images["wrist"], same.images["wrist"])
        assert not np.array_equal(one.state_TS[1:], different.state_TS[1:])
        arms = PlanarArms(
            config, [dataclasses.replace(start, hand_2=h.astype(np.float64)) for h in one.state_TS[:, 3:]]
        )
        np.testing.assert_allclose(expert_velocity(arms, expert), one.action_TD, atol=1e-5)
        step = np.abs(arms.images()["base"].astype(int) - one.images["base"].astype(int))
        assert step.max() <= 1  # the state is rounded to float32
