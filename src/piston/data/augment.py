"""Batch → Batch on the device: uint8 to [-1, 1], and the reference's training augmentation, per sample.

The augmentation equals augmax 0.4.1 as openpi calls it (openpi models/model.py `preprocess_observation`), given the
same draws: base cameras are cropped to 95 %, resized and rotated in one bilinear resampling; then every camera's
colours are jittered in HSV. The saturation draw has no effect there, so there is none here. Nothing is clipped, and
nothing waits for the device.
"""

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from piston.batch import AugmentDraws, Batch
from piston.data.resize import resize_with_pad

CROP = 0.95  # share of height and width that the crop keeps: int(size * 0.95) pixels


def to_unit_range(images: UInt8[Tensor, "*batch H W 3"]) -> Float[Tensor, "*batch H W 3"]:
    """uint8 → float32 in [-1, 1], as x / 255 · 2 − 1 in that order (openpi models/model.py `Observation.from_dict`)."""
    return images.to(torch.float32).div_(255.0).mul_(2.0).sub_(1.0)


def prepare(batch: Batch, cameras: tuple[str, ...], image_size: tuple[int, int] | None = None) -> Batch:
    """The batch the model takes: float32 images in [-1, 1], augmented where the batch carries draws.

    `cameras` names the C axis. `image_size` (height, width) resizes images of another size as the reference's model
    does; None keeps them. Float images are taken to be in [-1, 1] already.
    """
    images = batch.observation.images
    if images.dtype == torch.uint8:
        images = to_unit_range(images)
    if image_size is not None:
        images = resize_with_pad(images, *image_size)
    if batch.augment is not None:
        images = augment(images, batch.augment, cameras)
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, images=images))


def augment(
    images_BCHW3: Float[Tensor, "B C H W 3"], draws: AugmentDraws, cameras: tuple[str, ...]
) -> Float[Tensor, "B C H W 3"]:
    """Crops, rotates and jitters images in [-1, 1]; cameras with "wrist" in their name are only jittered.

    Vectorised over samples and cameras; the argument is left alone. Raises ValueError when names and images disagree.
    """
    count = images_BCHW3.shape[1]
    if len(cameras) != count:
        raise ValueError(
            f"augment got {len(cameras)} camera names {cameras} for images with {count} cameras; "
            "the names decide which cameras are rotated: pass ModelConfig.cameras"
        )
    unit_BCHW3 = (images_BCHW3 / 2.0).add_(0.5)
    for camera, name in enumerate(cameras):
        if "wrist" not in name:
            unit_BCHW3[:, camera] = crop_and_rotate(
                unit_BCHW3[:, camera], draws.crop_center_yx[:, camera], draws.theta[:, camera]
            )
    jittered_NHW3 = jitter_(
        unit_BCHW3.flatten(0, 1),
        draws.brightness.flatten(),
        draws.contrast.flatten(),
        draws.hue.flatten(),
        draws.jitter.flatten(),
    )
    return jittered_NHW3.mul_(2.0).sub_(1.0).unflatten(0, (-1, count))


def crop_and_rotate(
    images_BHW3: Float[Tensor, "B H W 3"], center_yx_B2: Float[Tensor, "B 2"], theta_B: Float[Tensor, "B"]
) -> Float[Tensor, "B H W 3"]:
    """One bilinear resampling of images in [0, 1]: the crop around `center` (pixels from the middle), turned by theta.

    Corners outside the image count as 0, each on its own, so edges fade. grid_sample runs in float64, because its
    float32 normalisation of coordinates would cost more than the reference's own rounding does.
    """
    _, height, width, _ = images_BHW3.shape
    scale_y, scale_x = int(height * CROP) / height, int(width * CROP) / width
    cos, sin = (f(theta_B.to(_wide(theta_B.device))).to(torch.float32) for f in (torch.cos, torch.sin))
    center_y, center_x = center_yx_B2.unbind(1)
    y_H = torch.arange(height, device=theta_B.device) - (height / 2 - 0.5)
    x_W = torch.arange(width, device=theta_B.device) - (width / 2 - 0.5)
    source_y_BHW = _source(cos * scale_y, y_H, sin * scale_y, x_W, center_y, middle=height / 2 - 0.5)
    source_x_BHW = _source(sin * -scale_x, y_H, cos * scale_x, x_W, center_x, middle=width / 2 - 0.5)
    grid_BHW2 = source_x_BHW.new_empty((*source_x_BHW.shape, 2))
    torch.div(source_x_BHW, width / 2, out=grid_BHW2[..., 0])
    torch.div(source_y_BHW, height / 2, out=grid_BHW2[..., 1])
    resampled = F.grid_sample(
        images_BHW3.permute(0, 3, 1, 2).to(grid_BHW2.dtype),
        grid_BHW2,
        mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
    )
    return resampled.permute(0, 2, 3, 1).to(images_BHW3.dtype)


def _source(
    along_y_B: Tensor, y_H: Tensor, along_x_B: Tensor, x_W: Tensor, offset_B: Tensor, *, middle: float
) -> Float[Tensor, "B H W"]:
    """One source coordinate of every output pixel, from the image's middle, rounded where the reference rounds.

    XLA evaluates the composed matrix in float32 as fma(along_x, x, along_y · y) + offset, and augmax then adds the
    middle (augmax geometric.py). The float64 product and sum stand for the fused multiply-add.
    """
    wide = _wide(y_H.device)
    rows_BH1 = (along_y_B[:, None] * y_H)[:, :, None].to(wide)
    columns_B1W = (along_x_B.to(wide)[:, None] * x_W.to(wide))[:, None, :]
    pixel_BHW = (rows_BH1 + columns_B1W).to(torch.float32).add_(offset_B[:, None, None]).add_(middle)
    return pixel_BHW.to(wide).sub_(middle)


def _wide(device: torch.device) -> torch.dtype:
    """float64 where the device has it; MPS does not, and is then some 1e-5 off the reference."""
    return torch.float32 if device.type == "mps" else torch.float64


def jitter_(
    images_NHW3: Float[Tensor, "N H W 3"],
    brightness_N: Float[Tensor, "N"],
    contrast_N: Float[Tensor, "N"],
    hue_N: Float[Tensor, "N"],
    apply_N: Bool[Tensor, "N"],
) -> Float[Tensor, "N H W 3"]:
    """Changes brightness, contrast and hue of RGB images in [0, 1], in place, where `apply` (augmax `ColorJitter`).

    brightness in (−0.3, 0.3) and contrast in (−0.4, 0.4) bend the HSV value; hue is added in full turns. On the CPU
    only the images that need it are worked on; a GPU works on all, since counting them would make the host wait.
    """
    if images_NHW3.device.type == "cpu":
        chosen = apply_N.nonzero().squeeze(1)
        changed = _jittered(images_NHW3[chosen], brightness_N[chosen], contrast_N[chosen], hue_N[chosen])
        return images_NHW3.index_copy_(0, chosen, changed)
    changed = _jittered(images_NHW3, brightness_N, contrast_N, hue_N)
    return images_NHW3.copy_(torch.where(apply_N[:, None, None, None], changed, images_NHW3))


def _jittered(images_NHW3: Tensor, brightness_N: Tensor, contrast_N: Tensor, hue_N: Tensor) -> Tensor:
    brightness, contrast, hue = (draw[:, None, None] for draw in (brightness_N, contrast_N, hue_N))
    r, g, b = images_NHW3.movedim(-1, 0).contiguous()
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    hue6 = _hue6(r, g, b, value, chroma).add_(6.0 * hue)
    saturation = chroma.div_(_nonzero(value))
    value = _contrast(_brightness(value, brightness), contrast)
    # each channel lies below the value by V·S times a ramp of its distance, around the hue circle, from its complement
    around_3NHW = hue6 + torch.arange(3, -3, -2, device=hue6.device)[:, None, None, None]
    around_3NHW.sub_(around_3NHW.div(6.0).round_(), alpha=6.0)
    ramp_3NHW = around_3NHW.abs_().neg_().add_(2.0).clamp_(0.0, 1.0)
    drop_3NHW = ramp_3NHW.mul_(saturation.mul_(value))
    return torch.sub(value, drop_3NHW, out=drop_3NHW).movedim(0, -1)


# Selections below are lerps with a weight of exactly 0 or 1: the same numbers as torch.where, which branches per pixel
# on the CPU and takes eight times as long.


def _hue6(r: Tensor, g: Tensor, b: Tensor, value: Tensor, chroma: Tensor) -> Tensor:
    """Hue in sixths of a turn, in [−1, 5]; 0 for greys."""
    red, green = _weight(torch.eq, r, value), _weight(torch.eq, g, value)
    difference = (r - g).lerp_(b - r, green).lerp_(g - b, red)
    corner = (4.0 - 2.0 * green).mul_(1.0 - red)
    return difference.div_(_nonzero(chroma)).add_(corner)


def _brightness(value: Tensor, amount: Tensor) -> Tensor:
    """Darkens to V·(1 + b) for b < 0, lightens to V·(1 − b) + b otherwise (augmax functional/colorspace.py)."""
    return (value * (1.0 - amount.abs())).add_(amount.clamp(min=0.0))


def _contrast(value: Tensor, amount: Tensor) -> Tensor:
    """A three-piece curve through (0, 0), (½, ½) and (1, 1) with slope s in the middle and 1/s at both ends."""
    slope = torch.tan((amount + 1.0) * (torch.pi / 4))
    low = (slope - slope.square()) / (2.0 * (1.0 - slope.square()))
    # slope 1 makes `low` NaN and both comparisons false: the middle piece, which is then the identity, as in augmax
    below, above = _weight(torch.lt, value, low), _weight(torch.gt, value, 1.0 - low)
    ends = (value / slope).addcmul_(above, 1.0 - 1.0 / slope)
    return (value - 0.5).mul_(slope).add_(0.5).lerp_(ends, below.add_(above))


def _weight(comparison: Callable[..., Tensor], a: Tensor, b: Tensor | float) -> Tensor:
    """1.0 where the comparison holds, else 0.0, in the dtype of `a`."""
    return comparison(a, b, out=torch.empty_like(a))


def _nonzero(divisor: Tensor) -> Tensor:
    """The divisor with 1 in place of 0, for quotients whose numerator is 0 there too."""
    return _weight(torch.eq, divisor, 0.0).add_(divisor)
