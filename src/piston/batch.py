"""The contract between rooms: what one batch is, in which shapes, and the legend of every dimension letter.

Legend (tensor names carry these letters as a suffix, e.g. `q_BNQE`):

    B batch                 C cameras               H W image height, width in pixels
    P patches per image     L prompt tokens         T prefix tokens = C·P + L
    A action horizon        D action dimension      S suffix tokens = A (π0.5) or A + 1 (π0)
    N tokens = T + S        V SigLIP width          X VLM width          Y action-expert width
    F MLP width             Q query heads           K key/value heads    E head width
    R LoRA rank

Left of this file is numpy on the CPU; right of it torch on a device. Images stay uint8 until they are on the device
(`data/augment.py` scales them to [-1, 1]).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64, UInt8
from torch import Tensor


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same (nested) batch dataclass with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if value is None:
        return None
    fields = dataclasses.fields(value)
    return dataclasses.replace(value, **{f.name: _each_tensor(getattr(value, f.name), change) for f in fields})


@dataclass(frozen=True)
class Observation:
    """What the policy sees. Cameras are stacked in the order of `ModelConfig.cameras`."""

    images: UInt8[Tensor, "B C H W 3"] | Float[Tensor, "B C H W 3"]  # uint8, or float32 in [-1, 1] on the device
    image_masks: Bool[Tensor, "B C"]  # False: this camera is absent from this sample
    state: Float[Tensor, "B D"]  # normalised, zero-padded to action_dim
    tokenized_prompt: Int32[Tensor, "B L"]
    tokenized_prompt_mask: Bool[Tensor, "B L"]


@dataclass(frozen=True)
class AugmentDraws:
    """The random numbers of one augmentation, per sample and camera (augmax 0.4.1 chain)."""

    crop_center_yx: Float[Tensor, "B C 2"]  # pixels: offset of the crop's centre from the image's centre
    theta: Float[Tensor, "B C"]  # radians
    brightness: Float[Tensor, "B C"]
    contrast: Float[Tensor, "B C"]
    hue: Float[Tensor, "B C"]  # in full turns
    jitter: Bool[Tensor, "B C"]  # whether the colour jitter is applied


@dataclass(frozen=True)
class Batch:
    """One training batch with all of its randomness: everything is a function of (seed, sample number)."""

    observation: Observation
    actions: Float[Tensor, "B A D"]  # normalised, zero-padded to action_dim
    noise: Float[Tensor, "B A D"]  # standard normal
    time: Float[Tensor, "B"]  # flow time in (0, 1]; t = 1 is noise
    sample_numbers: Int64[Tensor, "B"]  # global sample number n of each row
    augment: AugmentDraws | None  # None: no augmentation (evaluation)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; asynchronous where the source is pinned."""
        return _each_tensor(self, lambda t: t.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """The same batch in page-locked memory (needs CUDA)."""
        return _each_tensor(self, Tensor.pin_memory)


def check(batch: Batch, *, cameras: int, height: int, width: int, tokens: int, horizon: int, action_dim: int) -> None:
    """Raises ValueError, naming the field, if a batch does not have the shapes the model is built for."""
    observation = batch.observation
    size = batch.actions.shape[0]
    expected = {
        "images": (observation.images, (size, cameras, height, width, 3)),
        "image_masks": (observation.image_masks, (size, cameras)),
        "state": (observation.state, (size, action_dim)),
        "tokenized_prompt": (observation.tokenized_prompt, (size, tokens)),
        "tokenized_prompt_mask": (observation.tokenized_prompt_mask, (size, tokens)),
        "actions": (batch.actions, (size, horizon, action_dim)),
        "noise": (batch.noise, (size, horizon, action_dim)),
        "time": (batch.time, (size,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"batch field `{name}` has shape {tuple(tensor.shape)}, expected {shape} for this model; "
                "the data transforms and the model configuration disagree: compare --model.* with the recipe's robot"
            )
