"""Every random number of a sample as a function of (seed, sample number): noise, flow time, augmentation.

A counter-based generator (Philox) is placed at the sample's own counter, so the draws are the same for any number of
loader workers, any device, any world size and any point of resumption. Drawn in this order: flow time, noise,
augmentation; so switching augmentation off changes neither of the others.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

_TRAIN, _VALIDATION = 0x7069_7374_6F6E, 0x7661_6C69_64  # Philox key words: validation draws are a stream of their own

# Ranges: openpi models/model.py (preprocess_observation) through augmax 0.4.1.
MAX_ROTATION = math.radians(5.0)
BRIGHTNESS, CONTRAST, HUE = 0.3, 0.4, 0.1
JITTER_PROBABILITY = 0.5
CROP_FRACTION = 0.95


class CameraDraws(NamedTuple):
    """The augmentation draws of one sample, cameras in the model's order. Units: pixels, radians, turns of hue."""

    crop_center_yx: Float32[np.ndarray, "C 2"]
    theta: Float32[np.ndarray, "C"]
    brightness: Float32[np.ndarray, "C"]
    contrast: Float32[np.ndarray, "C"]
    hue: Float32[np.ndarray, "C"]
    jitter: Bool[np.ndarray, "C"]


class Draws(NamedTuple):
    """All randomness of one sample."""

    time: np.float32  # flow time in [0.001, 1], distributed as Beta(1.5, 1) · 0.999 + 0.001
    noise: Float32[np.ndarray, "A D"]  # standard normal
    cameras: CameraDraws | None  # None without augmentation


def draw(
    seed: int,
    sample_number: int,
    *,
    horizon: int,
    action_dim: int,
    cameras: tuple[str, ...] = (),
    image_size: tuple[int, int] = (224, 224),
    validation: bool = False,
) -> Draws:
    """The draws of one sample. `cameras` empty: no augmentation. `image_size`: height, width in pixels."""
    key = np.array([seed % 2**64, _VALIDATION if validation else _TRAIN], np.uint64)
    counter = np.array([0, 0, sample_number, 0], np.uint64)
    rng = np.random.Generator(np.random.Philox(counter=counter, key=key))
    # Beta(1.5, 1) has the distribution function x^1.5, so u^(2/3) is a draw. openpi models/pi0.py (compute_loss).
    time = np.float32(rng.random() ** (2.0 / 3.0) * 0.999 + 0.001)
    noise = rng.standard_normal((horizon, action_dim), dtype=np.float32)
    return Draws(time, noise, _draw_cameras(rng, cameras, image_size) if cameras else None)


def _draw_cameras(rng: np.random.Generator, cameras: tuple[str, ...], image_size: tuple[int, int]) -> CameraDraws:
    """One set of draws for the base cameras and one for the wrist cameras.

    The reference uses one random key for every camera of a sample, and the chain of operations decides which part of it
    becomes which draw: so cameras with the same chain (all with "wrist" in the name, or all without) get equal draws.
    Wrist cameras have no geometric part.
    """
    base, wrist = rng.uniform(-1.0, 1.0, (2, 6))
    base_applies, wrist_applies = rng.random(2) < JITTER_PROBABILITY
    is_wrist = np.array(["wrist" in name for name in cameras])
    unit = np.where(is_wrist[:, None], wrist, base)  # [C, 6], each U(-1, 1)
    geometric = np.where(is_wrist, 0.0, 1.0)
    reach = np.array([(size - int(size * CROP_FRACTION)) / 2 for size in image_size])
    return CameraDraws(
        crop_center_yx=(unit[:, :2] * reach * geometric[:, None]).astype(np.float32),
        theta=(unit[:, 2] * MAX_ROTATION * geometric).astype(np.float32),
        brightness=(unit[:, 3] * BRIGHTNESS).astype(np.float32),
        contrast=(unit[:, 4] * CONTRAST).astype(np.float32),
        hue=(unit[:, 5] * HUE).astype(np.float32),
        jitter=np.where(is_wrist, wrist_applies, base_applies),
    )
