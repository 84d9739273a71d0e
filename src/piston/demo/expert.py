"""The scripted expert: drives the hand to the prompted block, fast when far and gently when near.

The expert reads the simulator's truth, so it needs no camera. While an episode is recorded its motion is disturbed by
random pushes; the recorded action is the expert's answer to where the hand really is. So the data set shows how to come
back from mistakes that a trained policy will make, which clean demonstrations would not.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from piston.demo.planar_arm import ArmConfig, PlanarArms, Scene


@dataclass(frozen=True)
class ExpertConfig:
    """How the expert moves and how hard it is pushed."""

    gain: float = 4.0  # 1/s: velocity per metre of error, before the speed limit
    push: float = 0.012  # m, standard deviation of the disturbance of each step, per axis
    steps: int = 24  # frames of a recorded episode


def expert_velocity(arms: PlanarArms, expert: ExpertConfig) -> Float[np.ndarray, "N 2"]:
    """The expert's command [m/s] for every arm: proportional to the error, never faster than the arm can move."""
    velocity_N2 = expert.gain * arms.error_N2
    speed_N1 = np.linalg.norm(velocity_N2, axis=1, keepdims=True)
    return velocity_N2 * np.minimum(1.0, arms.config.max_speed / np.maximum(speed_N1, 1e-9))


@dataclass(frozen=True)
class Demonstration:
    """One recorded episode, T frames: what the cameras and joints said, and what the expert did about it."""

    prompt: str
    images: dict[str, UInt8[np.ndarray, "T H W 3"]]
    state_TS: Float[np.ndarray, "T S"]  # float32, planar_arm.STATE_NAMES
    action_TD: Float[np.ndarray, "T D"]  # float32, planar_arm.ACTION_NAMES


def demonstrate(config: ArmConfig, expert: ExpertConfig, scenes: list[Scene], seed: int) -> list[Demonstration]:
    """Records one episode per scene, all in step. The pushes come from `seed`."""
    arms = PlanarArms(config, scenes)
    rng = np.random.default_rng([seed, 1])
    frames: list[dict[str, np.ndarray]] = []
    states: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    for _ in range(expert.steps):
        frames.append(arms.images())
        states.append(arms.state())
        velocity_N2 = expert_velocity(arms, expert)
        actions.append(velocity_N2.astype(np.float32))
        arms.step(velocity_N2, push_N2=rng.normal(0.0, expert.push, size=velocity_N2.shape))
    return [
        Demonstration(
            prompt=scene.prompt,
            images={camera: np.stack([frame[camera][i] for frame in frames]) for camera in frames[0]},
            state_TS=np.stack([state[i] for state in states]),
            action_TD=np.stack([action[i] for action in actions]),
        )
        for i, scene in enumerate(scenes)
    ]
