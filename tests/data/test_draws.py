"""The randomness of a sample: the reference's distributions, and a pure function of seed and number."""

import numpy as np
import pytest

from piston.data.draws import Draws, draw

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PINNED_TIME = 0.8121297359466553
PINNED_NOISE = [[-0.14474400877952576, 0.020315617322921753, -0.399279922246933]]


def some(count: int, **changes: object) -> list[Draws]:
    options = {"horizon": 4, "action_dim": 3, "cameras": CAMERAS, "image_size": (224, 224), **changes}
    return [draw(5, n, **options) for n in range(count)]  # pyright: ignore[reportArgumentType]


def same(a: Draws, b: Draws) -> bool:
    assert a.cameras is not None
    assert b.cameras is not None
    pairs = [(a.time, b.time), (a.noise, b.noise), *zip(a.cameras, b.cameras, strict=True)]
    return all(np.array_equal(x, y) for x, y in pairs)


def test_a_sample_has_its_own_draws_whenever_it_is_asked() -> None:
    draws = some(20)
    assert all(same(a, b) for a, b in zip(draws, reversed(some(20)[::-1]), strict=True))
    assert not any(same(draws[0], other) for other in draws[1:])
    assert not same(draws[0], some(1, validation=True)[0])
    assert draw(2**63, 2**62, horizon=2, action_dim=2).noise.shape == (2, 2)


def test_augmentation_changes_neither_noise_nor_time() -> None:
    with_augmentation, without = some(5), some(5, cameras=())
    for a, b in zip(with_augmentation, without, strict=True):
        assert b.cameras is None
        assert a.time == b.time
        assert np.array_equal(a.noise, b.noise)


def test_noise_is_standard_normal_and_time_is_beta() -> None:
    draws = some(4000)
    noise = np.stack([d.noise for d in draws])
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert abs((noise**4).mean() - 3) < 0.2
    time = np.sort(np.array([d.time for d in draws]))
    assert time.dtype == np.float32
    assert time[0] >= 0.001
    assert time[-1] <= 1
    cumulative = ((time.astype(float) - 0.001) / 0.999) ** 1.5  # Beta(1.5, 1)
    assert np.abs(cumulative - (np.arange(4000) + 0.5) / 4000).max() < 1.63 / np.sqrt(4000)  # Kolmogorov-Smirnov, 1 %


@pytest.mark.parametrize(
    ("field", "reach"), [("brightness", 0.3), ("contrast", 0.4), ("hue", 0.1), ("theta", np.deg2rad(5))]
)
def test_scalar_draws_are_uniform(field: str, reach: float) -> None:
    values = np.stack([getattr(d.cameras, field) for d in some(3000)])[:, 0] / reach
    assert np.abs(values).max() <= 1
    assert np.abs(np.sort(values) - np.linspace(-1, 1, 3000)).max() < 2 * 1.63 / np.sqrt(3000)


def test_crop_reaches_the_border_of_each_axis() -> None:
    centres = np.stack([d.cameras.crop_center_yx for d in some(2000, image_size=(224, 56)) if d.cameras])[:, 0]
    reach = np.abs(centres).max(axis=0)
    assert 5.9 < reach[0] <= 6.0  # (224 - 212) / 2
    assert 1.45 < reach[1] <= 1.5  # (56 - 53) / 2


def test_jitter_is_applied_half_the_time() -> None:
    jitter = np.stack([d.cameras.jitter for d in some(4000) if d.cameras])
    assert np.abs(jitter.mean(axis=0) - 0.5).max() < 0.04
    assert abs(np.mean(jitter[:, 0] == jitter[:, 1]) - 0.5) < 0.04  # base and wrist decide independently


def test_wrist_cameras_share_their_jitter_and_have_no_geometry() -> None:
    for d in some(50):
        cameras = d.cameras
        assert cameras is not None
        for name in ("brightness", "contrast", "hue", "jitter"):
            base, left, right = getattr(cameras, name)
            assert left == right
            assert name == "jitter" or base != left
        assert not cameras.theta[1:].any()
        assert not cameras.crop_center_yx[1:].any()


def test_the_draws_are_pinned() -> None:
    # numpy does not promise its distributions for ever: a release that changes them must not change a run in silence.
    d = draw(42, 7, horizon=1, action_dim=3, cameras=CAMERAS)
    assert float(d.time) == PINNED_TIME
    assert d.noise.tolist() == PINNED_NOISE
