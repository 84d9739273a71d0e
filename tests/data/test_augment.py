"""Augmentation equals augmax given the same draws, at any size, and touches only what it should."""

import colorsys
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.batch import AugmentDraws, Batch, Observation
from piston.data import augment as room
from piston.data.augment import augment, crop_and_rotate, jitter_, prepare, to_unit_range

GOLDEN = Path(__file__).parents[1] / "golden"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "preprocess_augment.npz"))


def golden_case(golden: dict[str, np.ndarray], case: str) -> tuple[tuple[str, ...], torch.Tensor, AugmentDraws]:
    cameras = tuple(camera for camera in CAMERAS if f"{case}/out/{camera}" in golden)
    images = np.stack([golden[f"{case}/in_u8/{camera}"] for camera in cameras], axis=1)

    def draw(name: str, tail: tuple[int, ...] = ()) -> torch.Tensor:
        missing = np.full((len(images), *tail), np.nan, np.float32)  # wrist cameras have no geometry to draw
        return torch.from_numpy(
            np.stack([golden.get(f"{case}/params/{camera}/{name}", missing) for camera in cameras], axis=1)
        )

    draws = AugmentDraws(
        crop_center_yx=draw("crop_center_yx", (2,)),
        theta=draw("theta_rad"),
        brightness=draw("brightness"),
        contrast=draw("contrast"),
        hue=draw("hue"),
        jitter=draw("jitter_applied"),
    )
    return cameras, torch.from_numpy(images), draws


def random_draws(batch: int, cameras: int, *, seed: int = 0, apply: float = 0.5) -> AugmentDraws:
    generator = torch.Generator().manual_seed(seed)

    def uniform(limit: float, *tail: int) -> torch.Tensor:
        return (torch.rand(batch, cameras, *tail, generator=generator) * 2 - 1) * limit

    return AugmentDraws(
        crop_center_yx=uniform(1.5, 2),
        theta=uniform(math.radians(5)),
        brightness=uniform(0.3),
        contrast=uniform(0.4),
        hue=uniform(0.1),
        jitter=torch.rand(batch, cameras, generator=generator) < apply,
    )


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_equals_augmax(golden: dict[str, np.ndarray], case: str) -> None:
    cameras, images, draws = golden_case(golden, case)
    result = augment(to_unit_range(images), draws, cameras).numpy()
    for position, camera in enumerate(cameras):
        error = np.abs(result[:, position] - golden[f"{case}/out/{camera}"]).max()
        assert error <= 5e-6, (camera, error)  # required: 2e-5


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_geometry_equals_augmax(golden: dict[str, np.ndarray], case: str) -> None:
    _, images, draws = golden_case(golden, case)
    unit = to_unit_range(images[:, 0]) / 2 + 0.5
    result = crop_and_rotate(unit, draws.crop_center_yx[:, 0], draws.theta[:, 0]).numpy()
    np.testing.assert_allclose(result, golden[f"{case}/after_geometric_01/base_0_rgb"], rtol=0, atol=5e-7)


def numpy_geometry(image: np.ndarray, center: np.ndarray, theta: float) -> np.ndarray:
    """The same resampling, pixel by pixel in float64 (independent of the code under test)."""
    height, width, _ = image.shape
    result = np.zeros(image.shape)
    for row in range(height):
        for column in range(width):
            y, x = row - (height / 2 - 0.5), column - (width / 2 - 0.5)
            turned_y = math.cos(theta) * y + math.sin(theta) * x
            turned_x = -math.sin(theta) * y + math.cos(theta) * x
            in_y = turned_y * int(height * 0.95) / height + center[0] + height / 2 - 0.5
            in_x = turned_x * int(width * 0.95) / width + center[1] + width / 2 - 0.5
            for corner_y in (math.floor(in_y), math.floor(in_y) + 1):
                for corner_x in (math.floor(in_x), math.floor(in_x) + 1):
                    if 0 <= corner_y < height and 0 <= corner_x < width:
                        weight = (1 - abs(in_y - corner_y)) * (1 - abs(in_x - corner_x))
                        result[row, column] += weight * image[corner_y, corner_x]
    return result


@pytest.mark.parametrize(("height", "width"), [(14, 14), (15, 31), (40, 9), (21, 20)])
def test_geometry_at_other_sizes(height: int, width: int) -> None:
    images = torch.from_numpy(np.random.default_rng(1).random((3, height, width, 3), dtype=np.float32))
    center = torch.tensor([[0.0, 0.0], [0.7, -1.3], [-2.0, 2.0]])
    theta = torch.tensor([0.0, math.radians(5), math.radians(-4)])
    result = crop_and_rotate(images, center, theta).numpy()
    for i in range(3):
        expected = numpy_geometry(images[i].numpy().astype(float), center[i].numpy(), float(theta[i]))
        np.testing.assert_allclose(result[i], expected, rtol=0, atol=5e-6)


def colorsys_jitter(rgb: np.ndarray, brightness: float, contrast: float, hue: float) -> np.ndarray:
    """One pixel through Python's own HSV (independent of the code under test)."""
    h, s, v = colorsys.rgb_to_hsv(*rgb.tolist())
    v = v * (1 + brightness) if brightness < 0 else v * (1 - brightness) + brightness
    slope = math.tan((contrast + 1) * math.pi / 4)
    if abs(slope - 1) > 1e-9:
        low = (slope - slope**2) / (2 * (1 - slope**2))
        if v < low:
            v = v / slope
        elif v > 1 - low:
            v = v / slope + 1 - 1 / slope
        else:
            v = slope * (v - 0.5) + 0.5
    return np.array(colorsys.hsv_to_rgb((h + hue) % 1.0, s, v))


@given(
    pixels=st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=12),
    brightness=st.floats(-0.3, 0.3),
    contrast=st.floats(-0.4, 0.4),
    hue=st.floats(-0.1, 0.1),
)
@settings(max_examples=80, deadline=None)
def test_jitter_equals_colorsys(pixels: list, brightness: float, contrast: float, hue: float) -> None:
    images = torch.tensor(pixels, dtype=torch.float32)[None, None] / 255
    b, c, h = (torch.tensor([value]) for value in (brightness, contrast, hue))
    result = jitter_(images.clone(), b, c, h, torch.tensor([True]))[0, 0].numpy()
    expected = np.stack([colorsys_jitter(np.array(p) / 255, brightness, contrast, hue) for p in pixels])
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6)


def test_no_contrast_is_the_identity_curve() -> None:
    images = torch.rand(2, 5, 5, 3, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(2)
    result = jitter_(images.clone(), zero, zero, zero, torch.tensor([True, True]))
    torch.testing.assert_close(result, images, rtol=0, atol=1e-6)


def test_cpu_shortcut_equals_working_on_every_image() -> None:
    images = to_unit_range(random_images(6, 9, 7, 3)) / 2 + 0.5
    draws = random_draws(6, 1, apply=0.5)
    b, c, h, apply = (d.flatten() for d in (draws.brightness, draws.contrast, draws.hue, draws.jitter))
    assert 0 < int(apply.sum()) < 6
    everywhere = torch.where(apply[:, None, None, None], room._jittered(images, b, c, h), images)
    assert torch.equal(jitter_(images.clone(), b, c, h, apply), everywhere)


@pytest.mark.parametrize("apply", [0.0, 1.0])
def test_all_or_nothing_jitter(apply: float) -> None:
    images = to_unit_range(random_images(4, 3, 8, 8, 3))
    result = augment(images, random_draws(4, 3, apply=2 * apply - 0.5), CAMERAS)
    wrist = (result - images)[:, 1:].abs().amax(dim=(2, 3, 4))
    assert bool((wrist > 0.01).all()) if apply else bool((wrist < 2e-7).all())


def test_only_base_cameras_are_resampled() -> None:
    images = to_unit_range(random_images(4, 3, 16, 16, 3))
    before = images.clone()
    result = augment(images, random_draws(4, 3, apply=-1.0), CAMERAS)
    assert torch.equal(images, before)
    torch.testing.assert_close(result[:, 1:], images[:, 1:], rtol=0, atol=2e-7)
    assert float((result[:, 0] - images[:, 0]).abs().mean()) > 0.1


@given(batch=st.integers(1, 4), height=st.integers(2, 40), width=st.integers(2, 40), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_sample_does_not_depend_on_its_batch(batch: int, height: int, width: int, seed: int) -> None:
    images = to_unit_range(random_images(batch, 2, height, width, 3, seed=seed))
    draws = random_draws(batch, 2, seed=seed)
    cameras = ("base_0_rgb", "left_wrist_0_rgb")
    together = augment(images, draws, cameras)
    assert together.shape == images.shape
    assert bool(together.isfinite().all())
    last = {name: getattr(draws, name)[-1:] for name in draws.__dataclass_fields__}
    torch.testing.assert_close(augment(images[-1:], AugmentDraws(**last), cameras), together[-1:], rtol=0, atol=1e-6)


def test_wrong_number_of_cameras_is_an_error() -> None:
    images = to_unit_range(random_images(1, 3, 8, 8, 3))
    with pytest.raises(ValueError, match="2 camera names"):
        augment(images, random_draws(1, 3), CAMERAS[:2])


def batch_of(images: torch.Tensor, draws: AugmentDraws | None) -> Batch:
    size = images.shape[0]
    return Batch(
        observation=Observation(
            images=images,
            image_masks=torch.ones(images.shape[:2], dtype=torch.bool),
            state=torch.zeros(size, 8),
            tokenized_prompt=torch.zeros(size, 4, dtype=torch.int32),
            tokenized_prompt_mask=torch.ones(size, 4, dtype=torch.bool),
        ),
        actions=torch.zeros(size, 5, 8),
        noise=torch.zeros(size, 5, 8),
        time=torch.ones(size),
        sample_numbers=torch.arange(size),
        augment=draws,
    )


def test_prepare_scales_and_augments_only_with_draws() -> None:
    images, draws = random_images(2, 3, 10, 12, 3), random_draws(2, 3)
    plain = prepare(batch_of(images, None), CAMERAS).observation.images
    expected = images.numpy().astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)
    assert np.array_equal(plain.numpy(), expected)
    augmented = prepare(batch_of(images, draws), CAMERAS).observation.images
    assert torch.equal(augmented, augment(plain, draws, CAMERAS))
    assert torch.equal(prepare(batch_of(plain, None), CAMERAS).observation.images, plain)


def test_prepare_equals_the_reference_observation() -> None:
    golden = dict(np.load(GOLDEN / "preprocess_observation_eval.npz"))
    for camera in CAMERAS:
        images = torch.from_numpy(golden[f"in_images_u8/{camera}"])[:, None]
        result = prepare(batch_of(images, None), (camera,), image_size=(224, 224)).observation.images[:, 0]
        np.testing.assert_allclose(result.numpy(), golden[f"out_images/{camera}"], rtol=0, atol=5e-7)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there are no numbers: whatever would read one on the host raises, as would a CPU tensor."""
    images = torch.empty(4, 3, 28, 42, 3, dtype=torch.uint8, device="meta")
    draws = random_draws(4, 3)
    moved = AugmentDraws(**{name: getattr(draws, name).to("meta") for name in draws.__dataclass_fields__})
    result = prepare(batch_of(images, None).to("meta"), CAMERAS).observation.images
    result = augment(result, moved, CAMERAS)
    assert (result.device.type, result.dtype, result.shape) == ("meta", torch.float32, images.shape)
    with pytest.raises((RuntimeError, NotImplementedError)):
        moved.jitter.nonzero()
