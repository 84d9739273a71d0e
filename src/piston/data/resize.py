"""The reference's two ways to bring an image to model size: Pillow in the data path, jax.image's in the model.

Both keep the aspect ratio, round the new size down, and centre the picture on black; they differ in rounding, so each
has its place. Training and serving use `pillow_resize_with_pad`; `resize_with_pad` is for images of another size that
reach the model itself.
"""

import numpy as np
import torch
from jaxtyping import Float, Float32, Shaped, UInt8
from PIL import Image
from torch import Tensor


def fitted_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Height and width of `size` shrunk or grown to fit into `target`, rounded down (openpi shared/image_tools.py).

    Raises ValueError for an image so long and thin that nothing of it would be left.
    """
    ratio = max(size[1] / target[1], size[0] / target[0])
    fitted = int(size[0] / ratio), int(size[1] / ratio)
    if min(fitted) < 1:
        raise ValueError(
            f"an image of {size[0]}x{size[1]} pixels (height x width) shrinks to {fitted[0]}x{fitted[1]} inside "
            f"{target[0]}x{target[1]}; expected at least one pixel each way: crop the camera's images first"
        )
    return fitted


def pillow_resize_with_pad(image: UInt8[np.ndarray, "h w 3"], height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """The image inside height × width on black, by Pillow's antialiased BILINEAR (openpi-client image_tools.py).

    An image of the right size comes back untouched.
    """
    if image.shape[:2] == (height, width):
        return image
    return pad_on_black(pillow_resize(image, fitted_size(image.shape[:2], (height, width))), height, width)


def pillow_resize(image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "H W 3"]:
    """The image at `size` (height, width), whatever its aspect ratio, by Pillow's antialiased BILINEAR."""
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), resample=Image.Resampling.BILINEAR))


def pad_on_black(image: UInt8[np.ndarray, "h w 3"], height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """The image, no larger than height × width, in the middle of black."""
    canvas = np.zeros((height, width, 3), dtype=np.uint8)
    canvas[margins(image.shape[:2], (height, width))] = image
    return canvas


def margins(size: tuple[int, int], target: tuple[int, int]) -> tuple[slice, slice]:
    """Where an image of `size` stands inside `target`: in the middle, an odd pixel more below and to the right."""
    top, left = (target[0] - size[0]) // 2, (target[1] - size[1]) // 2
    return slice(top, top + size[0]), slice(left, left + size[1])


def resize_with_pad(images: Shaped[Tensor, "*batch h w 3"], height: int, width: int) -> Shaped[Tensor, "*batch H W 3"]:
    """The images inside height × width on black, as jax.image's antialiased linear (openpi shared/image_tools.py).

    uint8 is computed in float32, rounded half to even and padded with 0; float32 is clipped to [-1, 1] and padded with
    −1. Images of the right size come back untouched. Raises ValueError for other dtypes.
    """
    if images.dtype not in (torch.uint8, torch.float32):
        raise ValueError(
            f"resize_with_pad got images of {images.dtype}; expected torch.uint8, or torch.float32 in [-1, 1]: "
            "convert them before they reach the model"
        )
    size = images.shape[-3], images.shape[-2]
    if size == (height, width):
        return images
    rows, columns = fitted_size(size, (height, width))
    resized = _resized(images, rows, columns)
    if images.dtype == torch.uint8:
        resized, black = resized.round_().clamp_(0, 255).to(torch.uint8), 0
    else:
        resized, black = resized.clamp_(-1.0, 1.0), -1.0
    canvas = torch.full((*images.shape[:-3], height, width, 3), black, dtype=images.dtype, device=images.device)
    top, left = (height - rows) // 2, (width - columns) // 2
    canvas[..., top : top + rows, left : left + columns, :] = resized
    return canvas


def _resized(images: Tensor, rows: int, columns: int) -> Float32[Tensor, "*batch H W 3"]:
    """Both contractions, cheaper order first as XLA's einsum path does; in float64 on CUDA, where TF32 may be on."""
    h, w = images.shape[-3], images.shape[-2]
    dtype = torch.float64 if images.device.type == "cuda" else torch.float32
    down = triangle_weights(h, rows).to(images.device, dtype)
    across = triangle_weights(w, columns).to(images.device, dtype)
    images = images.to(dtype)
    if rows * w * (h + columns) <= columns * h * (w + rows):
        images = torch.einsum("iw,...hwc->...hic", across, torch.einsum("ih,...hwc->...iwc", down, images))
    else:
        images = torch.einsum("ih,...hwc->...iwc", down, torch.einsum("iw,...hwc->...hic", across, images))
    return images.to(torch.float32)


def triangle_weights(size: int, new_size: int) -> Float[Tensor, "new old"]:
    """The share of every old pixel in every new one: a triangle of half-width max(1, old/new), rows summing to 1.

    Computed on the CPU in float32, rounded where XLA rounds: positions by one fused multiply-add, sums from the left.
    """
    step = np.float32(size / new_size)
    reach = max(step, np.float32(1.0))
    half = np.arange(new_size, dtype=np.float64) + 0.5
    position = (half * np.float64(step) - 0.5).astype(np.float32)  # product exact in float64: a fused multiply-add
    distance = np.abs(position[:, None] - np.arange(size, dtype=np.float32)) * (np.float32(1.0) / reach)
    weights = np.maximum(np.float32(0.0), np.float32(1.0) - distance)
    return torch.from_numpy(weights / np.add.accumulate(weights, axis=1)[:, -1:])
