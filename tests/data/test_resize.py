"""Both resizes equal the reference's, and refuse what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.data.augment import to_unit_range
from piston.data.resize import fitted_size, pillow_resize_with_pad, resize_with_pad, triangle_weights

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "preprocess_resize.npz"))
CASES = sorted({name.split("/")[0] for name in GOLDEN})


def target(case: str) -> tuple[int, int]:
    height, width = case.split("_to_")[1].split("x")
    return int(height), int(width)


@pytest.mark.parametrize("case", CASES)
def test_pillow_resize_is_exact(case: str) -> None:
    result = pillow_resize_with_pad(GOLDEN[f"{case}/in_uint8"], *target(case))
    assert np.array_equal(result, GOLDEN[f"{case}/pil_uint8"])


@pytest.mark.parametrize("case", CASES)
def test_model_resize_of_uint8(case: str) -> None:
    """Exact but for ties: in one case one value in 8820 lies half-way and rounds the other way."""
    result = resize_with_pad(torch.from_numpy(GOLDEN[f"{case}/in_uint8"]), *target(case)).numpy()
    difference = np.abs(result.astype(int) - GOLDEN[f"{case}/jax_uint8"])
    assert difference.max() <= 1
    assert (difference > 0).sum() <= (1 if case == "53x90_to_42x70" else 0)


@pytest.mark.parametrize("case", [case for case in CASES if f"{case}/jax_float32" in GOLDEN])
def test_model_resize_of_float32(case: str) -> None:
    images = to_unit_range(torch.from_numpy(GOLDEN[f"{case}/in_uint8"]))
    result = resize_with_pad(images, *target(case)).numpy()
    np.testing.assert_allclose(result, GOLDEN[f"{case}/jax_float32"], rtol=0, atol=2e-6)


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    new_height=st.integers(1, 60),
    new_width=st.integers(1, 60),
    colour=st.integers(0, 255),
)
@settings(max_examples=60, deadline=None)
def test_a_plain_image_stays_plain_on_black(
    height: int, width: int, new_height: int, new_width: int, colour: int
) -> None:
    image = np.full((height, width, 3), colour, np.uint8)
    ratio = max(width / new_width, height / new_height)
    if min(int(height / ratio), int(width / ratio)) < 1:
        with pytest.raises(ValueError, match="at least one pixel"):
            pillow_resize_with_pad(image, new_height, new_width)
        return
    expected = np.zeros((new_height, new_width, 3), np.uint8)
    rows, columns = fitted_size((height, width), (new_height, new_width))
    top, left = (new_height - rows) // 2, (new_width - columns) // 2
    expected[top : top + rows, left : left + columns] = colour
    assert np.array_equal(pillow_resize_with_pad(image, new_height, new_width), expected)
    assert np.array_equal(resize_with_pad(torch.from_numpy(image)[None], new_height, new_width)[0].numpy(), expected)


def test_float_images_are_clipped_and_padded_with_black() -> None:
    images = torch.tensor([[[[3.0, -3.0, 0.0]] * 4] * 2])  # 2 x 4 pixels
    result = resize_with_pad(images, 4, 4)[0]
    assert result[0].tolist() == [[-1.0, -1.0, -1.0]] * 4
    assert result[1].tolist() == [[1.0, -1.0, 0.0]] * 4


@given(size=st.integers(1, 200), new_size=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_weights_of_a_new_pixel_sum_to_one(size: int, new_size: int) -> None:
    weights = triangle_weights(size, new_size)
    assert weights.shape == (new_size, size)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(new_size), rtol=0, atol=2e-6)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64.*convert"):
        resize_with_pad(torch.zeros(1, 4, 4, 3, dtype=torch.float64), 2, 2)
