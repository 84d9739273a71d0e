"""A planar robot arm over a table with coloured blocks, seen by two cameras: pure numpy, many arms at once.

The prompt names a colour; the hand has to come to rest over the block of that colour. What each input is good for:

* the prompt alone decides which block is meant; all blocks are on the table in every episode;
* the base camera looks down on the whole table. It shows where everything is, but coarsely, and the hand covers most of
  the block that it is above, so the last centimetres are hard to see from there;
* the wrist camera sits in the hand and sees a small square around it, sharply: enough to centre the hand over a
  block, useless for finding a block elsewhere.

Units: metres, radians, seconds. The table is the unit square; x to the right, y away from the arm's base, which stands
at (0.5, -0.15). Two links and a wrist joint that keeps the hand parallel to the table's edges (as a SCARA arm does).
Actions are hand velocities, so the mapping from command to motion is the same everywhere on the table; the joint
angles follow by inverse kinematics. Image rows run from far (y large) to near.

Letters: N arms, K blocks, H W pixels.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64, UInt8

COLOURS: dict[str, tuple[int, int, int]] = {"red": (214, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 225)}
# Table, floor and links are near mid-grey, which is 0 to the model: what stands out of it is what matters.
TABLE_RGB = (128, 128, 128)
FLOOR_RGB = (110, 110, 110)
LINK_RGB = (90, 92, 96)
JOINT_RGB = (40, 41, 45)
HAND_RGB = (58, 60, 66)
HAND_MARK_RGB = (245, 245, 245)

BASE_XY = (0.5, -0.15)
LINK_LENGTHS = (0.75, 0.75)
STATE_NAMES = ("shoulder", "elbow", "wrist", "hand_x", "hand_y")
ACTION_NAMES = ("hand_vx", "hand_vy")
CAMERA_NAMES = ("base", "wrist")


@dataclass(frozen=True)
class ArmConfig:
    """Everything that decides what an episode looks like. The data set's cache is keyed by it."""

    fps: int = 10
    image_size: int = 56  # pixels; both cameras are square
    max_speed: float = 0.6  # m/s, of the hand
    block_side: float = 0.2  # m
    block_separation: float = 0.3  # m, least distance between block centres
    block_low: tuple[float, float] = (0.12, 0.36)  # m, block centres lie between this corner …
    block_high: tuple[float, float] = (0.88, 0.88)  # … and that one
    home_xy: tuple[float, float] = (0.5, 0.1)  # m, where the hand starts …
    home_spread: float = 0.05  # m, … give or take, per axis
    hand_radius: float = 0.1  # m: hides all but the corners of a block when centred over it
    wrist_view: float = 0.32  # m, side of the square that the wrist camera sees
    base_view: float = 1.1  # m, side of the square that the base camera sees
    reach_tolerance: float = 0.04  # m, from the block's centre
    hold_steps: int = 5  # consecutive steps within the tolerance that count as reached
    max_steps: int = 30  # then the episode has failed


def prompt_for(colour: str) -> str:
    """The instruction that asks for the block of one colour."""
    return f"reach the {colour} block"


PROMPTS = tuple(prompt_for(colour) for colour in COLOURS)


def forward_kinematics(joints_N3: Float[np.ndarray, "N 3"]) -> Float[np.ndarray, "N 2"]:
    """Hand position [m] from shoulder and elbow angles [rad]; the wrist turns the hand without moving it."""
    shoulder_N, elbow_N = joints_N3[:, 0], joints_N3[:, 0] + joints_N3[:, 1]
    first, second = LINK_LENGTHS
    x_N = BASE_XY[0] + first * np.cos(shoulder_N) + second * np.cos(elbow_N)
    y_N = BASE_XY[1] + first * np.sin(shoulder_N) + second * np.sin(elbow_N)
    return np.stack([x_N, y_N], axis=1)


def inverse_kinematics(hand_N2: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "N 3"]:
    """Joint angles [rad] that put the hand at a position [m] with the elbow to the left and the hand unturned.

    Defined for positions within reach of the two links, which the whole table is.
    """
    first, second = LINK_LENGTHS
    dx_N, dy_N = hand_N2[:, 0] - BASE_XY[0], hand_N2[:, 1] - BASE_XY[1]
    cos_elbow_N = (dx_N**2 + dy_N**2 - first**2 - second**2) / (2 * first * second)
    elbow_N = -np.arccos(np.clip(cos_elbow_N, -1.0, 1.0))
    shoulder_N = np.arctan2(dy_N, dx_N) - np.arctan2(second * np.sin(elbow_N), first + second * np.cos(elbow_N))
    return np.stack([shoulder_N, elbow_N, np.pi / 2 - shoulder_N - elbow_N], axis=1)


@dataclass(frozen=True)
class Scene:
    """How one episode starts: where the blocks and the hand are, and which block the prompt asks for."""

    blocks_K2: Float[np.ndarray, "K 2"]
    hand_2: Float[np.ndarray, "2"]
    target: int  # index into COLOURS

    @property
    def prompt(self) -> str:
        return PROMPTS[self.target]


def scene(config: ArmConfig, seed: int, number: int) -> Scene:
    """Scene `number` of the stream `seed`; a pure function of its arguments. Targets cycle through the colours."""
    rng = np.random.default_rng([seed, number])
    blocks: list[np.ndarray] = []
    while len(blocks) < len(COLOURS):
        candidate = rng.uniform(config.block_low, config.block_high)
        if all(np.hypot(*(candidate - block)) >= config.block_separation for block in blocks):
            blocks.append(candidate)
    hand_2 = np.array(config.home_xy) + rng.uniform(-config.home_spread, config.home_spread, size=2)
    return Scene(np.stack(blocks), hand_2, number % len(COLOURS))


class PlanarArms:
    """N independent arms, stepped and drawn together."""

    def __init__(self, config: ArmConfig, scenes: list[Scene]):
        self.config = config
        self.scenes = scenes
        self.blocks_NK2 = np.stack([s.blocks_K2 for s in scenes])
        self.target_N = np.array([s.target for s in scenes], dtype=np.int64)
        self.hand_N2 = np.stack([s.hand_2 for s in scenes])
        self.held_N = np.zeros(len(scenes), dtype=np.int64)
        self.reached_N = np.zeros(len(scenes), dtype=bool)  # the prompted block was held, at any time so far

    @property
    def error_N2(self) -> Float[np.ndarray, "N 2"]:
        """From the hand to the prompted block [m]."""
        return self.blocks_NK2[np.arange(len(self.target_N)), self.target_N] - self.hand_N2

    def state(self) -> Float[np.ndarray, "N 5"]:
        """float32 proprioception in the order of `STATE_NAMES`: joint angles [rad], hand position [m]."""
        return np.concatenate([inverse_kinematics(self.hand_N2), self.hand_N2], axis=1).astype(np.float32)

    def images(self) -> dict[str, UInt8[np.ndarray, "N H W 3"]]:
        """What both cameras see now."""
        return render(self.config, self.hand_N2, self.blocks_NK2)

    def step(
        self, velocity_N2: Float[np.ndarray, "N 2"], push_N2: Float[np.ndarray, "N 2"] | None = None
    ) -> Bool[np.ndarray, "N"]:
        """Moves each hand for 1/fps seconds at its commanded velocity [m/s], cut to `max_speed`.

        `push_N2` [m] is a disturbance added to the motion. Returns which arms have reached their block by now.
        """
        speed_N1 = np.linalg.norm(velocity_N2, axis=1, keepdims=True)
        limit = self.config.max_speed
        moved_N2 = velocity_N2 * np.minimum(1.0, limit / np.maximum(speed_N1, limit)) / self.config.fps
        if push_N2 is not None:
            moved_N2 = moved_N2 + push_N2
        self.hand_N2 = np.clip(self.hand_N2 + moved_N2, 0.0, 1.0)
        inside_N = np.linalg.norm(self.error_N2, axis=1) <= self.config.reach_tolerance
        self.held_N = np.where(inside_N, self.held_N + 1, 0)
        self.reached_N = self.reached_N | (self.held_N >= self.config.hold_steps)
        return self.reached_N

    def nearest_block(self) -> Int64[np.ndarray, "N"]:
        """Index of the block nearest to each hand."""
        return np.argmin(np.linalg.norm(self.blocks_NK2 - self.hand_N2[:, None], axis=2), axis=1)


class _Canvas:
    """N square pictures of world windows; shapes are painted over each other with antialiased edges."""

    def __init__(self, centre_N2: np.ndarray, view: float, size: int, background: tuple[int, int, int]):
        self.pixel = view / size
        offset = (np.arange(size, dtype=np.float32) + 0.5) * np.float32(self.pixel) - np.float32(view / 2)
        centre_N2 = centre_N2.astype(np.float32)
        self.x_N1W = (centre_N2[:, 0, None] + offset)[:, None, :]
        self.y_NH1 = (centre_N2[:, 1, None] - offset)[:, :, None]
        self.rgb_N3HW = np.empty((len(centre_N2), 3, size, size), dtype=np.float32)
        self.rgb_N3HW[:] = np.array(background, dtype=np.float32)[:, None, None]

    def _paint(self, distance_NHW: np.ndarray, colour: tuple[int, int, int]) -> None:
        """Blends a colour in where the signed distance [m] to a shape's edge is negative."""
        cover_N1HW = np.clip(0.5 - distance_NHW / np.float32(self.pixel), 0.0, 1.0)[:, None]
        self.rgb_N3HW += cover_N1HW * (np.array(colour, dtype=np.float32)[:, None, None] - self.rgb_N3HW)

    def square(self, centre_N2: np.ndarray, side: float, colour: tuple[int, int, int]) -> None:
        c_N2 = centre_N2.astype(np.float32)[:, :, None, None]
        self._paint(
            np.maximum(np.abs(self.x_N1W - c_N2[:, 0]), np.abs(self.y_NH1 - c_N2[:, 1])) - np.float32(side / 2), colour
        )

    def disc(self, centre_N2: np.ndarray, radius: float, colour: tuple[int, int, int]) -> None:
        c_N2 = centre_N2.astype(np.float32)[:, :, None, None]
        self._paint(np.hypot(self.x_N1W - c_N2[:, 0], self.y_NH1 - c_N2[:, 1]) - np.float32(radius), colour)

    def bar(self, start_N2: np.ndarray, end_N2: np.ndarray, width: float, colour: tuple[int, int, int]) -> None:
        """A straight bar with round ends."""
        a_N2 = start_N2.astype(np.float32)[:, :, None, None]
        d_N2 = (end_N2 - start_N2).astype(np.float32)[:, :, None, None]
        px, py = self.x_N1W - a_N2[:, 0], self.y_NH1 - a_N2[:, 1]
        along = np.clip((px * d_N2[:, 0] + py * d_N2[:, 1]) / (d_N2[:, 0] ** 2 + d_N2[:, 1] ** 2), 0.0, 1.0)
        self._paint(np.hypot(px - along * d_N2[:, 0], py - along * d_N2[:, 1]) - np.float32(width / 2), colour)

    def finish(self) -> np.ndarray:
        return np.rint(self.rgb_N3HW).astype(np.uint8).transpose(0, 2, 3, 1).copy()


def _draw_table(canvas: _Canvas, config: ArmConfig, blocks_NK2: np.ndarray) -> None:
    canvas.square(np.full((len(blocks_NK2), 2), 0.5), 1.0, TABLE_RGB)
    for k, colour in enumerate(COLOURS.values()):
        canvas.square(blocks_NK2[:, k], config.block_side, colour)


def render(
    config: ArmConfig, hand_N2: Float[np.ndarray, "N 2"], blocks_NK2: Float[np.ndarray, "N K 2"]
) -> dict[str, UInt8[np.ndarray, "N H W 3"]]:
    """Both cameras' pictures for N hand positions over N tables; the same numbers give the same pixels."""
    size, count = config.image_size, len(hand_N2)
    base = _Canvas(np.full((count, 2), 0.5), config.base_view, size, FLOOR_RGB)
    _draw_table(base, config, blocks_NK2)
    shoulder_N2 = np.broadcast_to(np.array(BASE_XY), (count, 2))
    angle_N = inverse_kinematics(hand_N2)[:, 0]
    elbow_N2 = shoulder_N2 + LINK_LENGTHS[0] * np.stack([np.cos(angle_N), np.sin(angle_N)], axis=1)
    base.bar(shoulder_N2, elbow_N2, 0.05, LINK_RGB)
    base.bar(elbow_N2, hand_N2, 0.05, LINK_RGB)
    base.disc(elbow_N2, 0.035, JOINT_RGB)
    base.disc(hand_N2, config.hand_radius, HAND_RGB)
    base.disc(hand_N2, config.hand_radius / 2, HAND_MARK_RGB)

    wrist = _Canvas(hand_N2, config.wrist_view, size, FLOOR_RGB)
    _draw_table(wrist, config, blocks_NK2)
    for side in (-1.0, 1.0):  # the fingers, at the picture's left and right edges
        finger_N2 = hand_N2 + np.array([side * 0.47 * config.wrist_view, 0.0])
        wrist.bar(finger_N2, finger_N2 + np.array([0.0, 0.12 * config.wrist_view]), 0.03, JOINT_RGB)
    return {"base": base.finish(), "wrist": wrist.finish()}
