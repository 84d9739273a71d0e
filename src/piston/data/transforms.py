"""Raw sample ↔ model arrays: numpy dictionaries on the CPU, one step after another, each step with its inverse.

In:  robot's own units → π's (ALOHA) → actions relative to the state → normalised → prompt, images, padding.
Out: normalised, padded actions → un-normalised → absolute → the robot's own units, its own dimensions.

Order and formulas: openpi transforms.py, policies/*_policy.py, training/config.py. Numbers are float64 between the
columns and the last step, which rounds once to float32, as in the reference. Training, statistics and serving use these
same functions. Arrays are changed along their last axis, so one sample and a whole data set are the same call.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from piston.config.schema import RobotConfig, RunConfig
from piston.data.norm import NormStats, check_norm_stats, normalize, unnormalize
from piston.data.prompt import Tokenizer, check_vocabulary, tokenize
from piston.data.resize import pillow_resize_with_pad
from piston.data.units import robot_inputs, robot_outputs

log = logging.getLogger(__name__)

Sample = dict[str, Any]


# --- padding and images ----------------------------------------------------------------------------------------------


def pad_to_dim(x: Float[np.ndarray, "*batch d"], dim: int) -> Float[np.ndarray, "*batch padded"]:
    """Zeros appended to the last axis up to `dim`; a wider x is kept as it is (openpi transforms.py)."""
    missing = max(0, dim - x.shape[-1])
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def to_uint8_image(image: np.ndarray, camera: str) -> UInt8[np.ndarray, "h w 3"]:
    """uint8 height × width × RGB from uint8 or float in [0, 1] (truncated, so k/255 is exact), channels last or first.

    Raises ValueError, naming the camera, for anything else.
    """
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[-1] != 3:
        image = np.moveaxis(image, 0, -1)
    if image.ndim != 3 or image.shape[-1] != 3 or min(image.shape) < 1:
        raise ValueError(
            f"image of camera {camera} has shape {image.shape}; expected height x width x 3 (RGB): convert grey, RGBA "
            "or batched images before they reach the transforms"
        )
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating) or not (image.min() >= 0.0 and image.max() <= 1.0):
        raise ValueError(
            f"image of camera {camera} is {image.dtype} from {image.min()} to {image.max()}; "
            "expected uint8, or floats from 0 to 1: scale it"
        )
    return (255 * image.astype(np.float32)).astype(np.uint8)


# --- the whole ways in and out ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputTransform:
    """One raw sample → what the model takes (see `input_transform`). Holds no open file; can be pickled."""

    run: RunConfig
    stats: NormStats | None
    tokenizer: Tokenizer

    def __call__(self, sample: Sample) -> Sample:
        model, data = self.run.model, self.run.data
        state, actions = robot_inputs(data.robot, *self._arrays(sample))
        if self.stats is not None:
            state = normalize(state, self.stats["state"], use_quantiles=data.use_quantile_norm)
            if actions is not None:
                actions = normalize(actions, self.stats["actions"], use_quantiles=data.use_quantile_norm)
        tokens, token_mask = tokenize(
            self.tokenizer, self._prompt(sample), state if model.discrete_state_input else None, model.max_token_len
        )
        _check_ids(tokens, model.vocab_size)
        images, image_masks = self._images(sample["images"])
        out: Sample = {
            "images": images,
            "image_masks": image_masks,
            "state": pad_to_dim(state, model.action_dim).astype(np.float32),
            "tokenized_prompt": tokens,
            "tokenized_prompt_mask": token_mask,
        }
        if actions is not None:
            out["actions"] = pad_to_dim(actions, model.action_dim).astype(np.float32)
        return out

    def _arrays(self, sample: Sample) -> tuple[np.ndarray, np.ndarray | None]:
        robot, horizon = self.run.data.robot, self.run.model.action_horizon
        state = _checked(sample["state"], "state", (robot.state_dim,), robot)
        if sample.get("actions") is None:
            return state, None
        return state, _checked(sample["actions"], "actions", (horizon, robot.action_dim), robot)

    def _prompt(self, sample: Sample) -> str:
        """The sample's prompt, even an empty one; else the default (openpi transforms.py InjectDefaultPrompt)."""
        prompt = sample.get("prompt")
        prompt = self.run.data.default_prompt if prompt is None else prompt
        prompt = prompt.item() if isinstance(prompt, np.ndarray) else prompt
        if prompt is None:
            raise ValueError(
                "a sample has no prompt and data.default_prompt is None; expected a task text: keep "
                "data.prompt_from_task on for data sets with tasks, or pass --data.default-prompt TEXT"
            )
        return prompt.decode("utf-8") if isinstance(prompt, bytes) else str(prompt)

    def _images(self, images: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """All slots in the model's order; absent cameras are black and masked."""
        model = self.run.model
        unknown = sorted(set(images) - set(model.cameras))
        if unknown or not images:
            raise ValueError(
                f"a sample has images of {sorted(images) or 'no camera'}; expected some of the model's slots "
                f"{list(model.cameras)}: name them as in data.robot.cameras ({self.run.data.robot.name})"
            )
        height, width = model.image_size
        slots_CHW3 = np.zeros((len(model.cameras), height, width, 3), np.uint8)
        for slot, camera in enumerate(model.cameras):
            if camera in images:
                slots_CHW3[slot] = pillow_resize_with_pad(to_uint8_image(images[camera], camera), height, width)
            elif camera in self.run.data.robot.cameras:
                _warn_absent(camera)
        return slots_CHW3, np.array([camera in images for camera in model.cameras])


@dataclass(frozen=True)
class OutputTransform:
    """The model's normalised state and actions → the robot's actions (see `output_transform`). Can be pickled."""

    run: RunConfig
    stats: NormStats | None

    def __call__(self, sample: Sample) -> Sample:
        robot = self.run.data.robot
        state, actions = (np.asarray(sample[name], np.float64) for name in ("state", "actions"))
        if self.stats is not None:
            quantiles = self.run.data.use_quantile_norm
            state = unnormalize(state, self.stats["state"], use_quantiles=quantiles)
            actions = unnormalize(actions, self.stats["actions"], use_quantiles=quantiles)
        return {"actions": robot_outputs(robot, state, actions).astype(np.float32)}


def input_transform(run: RunConfig, stats: NormStats | None, tokenizer: Tokenizer) -> Callable[[Sample], Sample]:
    """The way in, for training and serving. `stats` None leaves numbers unnormalised (data sets of random numbers).

    Takes {"images": {slot: [h, w, 3]}, "state": [state_dim], "actions": [A, action_dim] or absent, "prompt": text or
    None}, gives {"images": uint8 [C, H, W, 3], "image_masks": bool [C], "state": float32 [D], "tokenized_prompt": int32
    [L], "tokenized_prompt_mask": bool [L], "actions": float32 [A, D] if given}. Raises ValueError now for statistics or
    a tokenizer that do not fit the run, and later for a sample of the wrong shape, with NaN, or without a prompt.
    """
    if stats is not None:
        check_norm_stats(stats, run)
    check_vocabulary(tokenizer, run.model.vocab_size)
    return InputTransform(run, stats, tokenizer)


def output_transform(run: RunConfig, stats: NormStats | None) -> Callable[[Sample], Sample]:
    """The way out. Takes {"state": [..., D] as the way in gave it, "actions": [..., A, D]}, gives {"actions": float32
    [..., A, robot's action_dim]} in the robot's own units."""
    if stats is not None:
        check_norm_stats(stats, run)
    return OutputTransform(run, stats)


def _checked(values: Any, name: str, shape: tuple[int, ...], robot: RobotConfig) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind != "f":
        array = array.astype(np.float32)
    if array.shape != shape:
        raise ValueError(
            f"{name} of a sample has shape {array.shape}; expected {shape} for robot {robot.name}: "
            "choose the robot that recorded the data, or correct its dimensions under data.robot"
        )
    if not np.isfinite(array).all():
        dims = sorted({int(index[-1]) for index in np.argwhere(~np.isfinite(array))})
        raise ValueError(
            f"{name} of a sample has NaN or infinity in dimension {', '.join(map(str, dims))}; expected finite "
            "numbers: `piston data check` lists the episodes; leave them out with --data.bad-episodes skip"
        )
    return array


def _check_ids(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.max(initial=0) >= vocab_size:
        raise ValueError(
            f"a prompt has token {int(tokens.max())}, the model embeds ids below {vocab_size} (model.vocab_size); the "
            "prompt spells out a special token that was added to the tokenizer: change the prompt"
        )


_absent: set[str] = set()


def _warn_absent(camera: str) -> None:
    if camera not in _absent:
        _absent.add(camera)
        log.warning(
            "a sample has no image of camera %s, which the robot has: it is black and masked, here and in every sample "
            "like it",
            camera,
        )
