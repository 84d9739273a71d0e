"""What openpi does to a sample before the model: resizing, augmentation, transforms, statistics."""

from itertools import pairwise
from typing import Any

import draw
import jax
import jax.numpy as jnp
import numpy as np
from openpi import transforms
from openpi.models import model as model_module
from openpi.shared import image_tools, normalize
from openpi_client import image_tools as client_image_tools

Arrays = dict[str, np.ndarray]

RESIZES = (
    ((120, 160), (56, 56)),
    ((53, 90), (42, 70)),
    ((97, 41), (30, 64)),
    ((31, 20), (56, 56)),
    ((42, 70), (42, 70)),
)
AUGMENTED = {
    "a": (5, (48, 64), ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")),
    "b": (4, (42, 70), ("front", "wrist")),
    "c": (1, (64, 64), ("base_0_rgb", "left_wrist_0_rgb")),
}
STATISTICS = ("mean", "std", "q01", "q99")


def resizes(seed: int) -> Arrays:
    """All arrays of preprocess_resize.npz."""
    rng = np.random.default_rng((seed, 4))
    arrays: Arrays = {}
    for (height, width), (to_height, to_width) in RESIZES:
        case = f"{height}x{width}_to_{to_height}x{to_width}"
        image = draw.smooth_images((height, width, 3), rng)
        arrays[f"{case}/in_uint8"] = image
        arrays[f"{case}/pil_uint8"] = client_image_tools.resize_with_pad(image, to_height, to_width)
        arrays[f"{case}/jax_uint8"] = np.asarray(image_tools.resize_with_pad(image, to_height, to_width))
        unit = draw.unit_range(image)
        if unit.shape[:2] != (to_height, to_width):  # openpi does not call it for an image of the right size
            arrays[f"{case}/jax_float32"] = np.asarray(image_tools.resize_with_pad(unit, to_height, to_width))
    return arrays


def _observation(images: dict[str, np.ndarray], masks: dict[str, np.ndarray]) -> model_module.Observation:
    state = np.zeros((next(iter(images.values())).shape[0], 8), np.float32)
    return model_module.Observation.from_dict({"image": dict(images), "image_mask": masks, "state": state})


def evaluation(seed: int) -> Arrays:
    """All arrays of preprocess_observation_eval.npz: preprocess_observation without training, one mask left out."""
    rng = np.random.default_rng((seed, 5))
    sizes = {"base_0_rgb": (60, 80), "left_wrist_0_rgb": (48, 48), "right_wrist_0_rgb": (56, 56)}
    images = {camera: draw.smooth_images((1, *size, 3), rng) for camera, size in sizes.items()}
    masks = {camera: np.array([camera == "base_0_rgb"]) for camera in sizes if camera != "left_wrist_0_rgb"}
    given = _observation(images, masks)
    result = model_module.preprocess_observation(
        None, given, train=False, image_keys=tuple(sizes), image_resolution=(56, 56)
    )
    arrays = {f"in_images_u8/{k}": v for k, v in images.items()} | {f"in_masks/{k}": v for k, v in masks.items()}
    arrays.update({f"out_images/{k}": np.asarray(v) for k, v in result.images.items()})
    arrays.update({f"out_masks/{k}": np.asarray(v) for k, v in result.image_masks.items()})
    return {**arrays, "state": np.asarray(given.state)}


def augmentation(seed: int) -> Arrays:
    """All arrays of preprocess_augment.npz: preprocess_observation in training, and what it drew."""
    rng = np.random.default_rng((seed, 6))
    arrays: Arrays = {}
    for case, (batch, size, cameras) in AUGMENTED.items():
        key_seed = seed + ord(case)
        images = {camera: draw.smooth_images((batch, *size, 3), rng) for camera in cameras}
        result = model_module.preprocess_observation(
            jax.random.key(key_seed), _observation(images, {}), train=True, image_keys=cameras, image_resolution=size
        )
        arrays[f"{case}/seed"] = np.asarray(key_seed)
        for camera in cameras:
            arrays[f"{case}/in_u8/{camera}"] = images[camera]
            arrays[f"{case}/out/{camera}"] = np.asarray(result.images[camera])
            drawn = augment_draws(jax.random.key(key_seed), batch, size, wrist="wrist" in camera)
            arrays.update({f"{case}/params/{camera}/{k}": np.asarray(v) for k, v in drawn.items()})
    return arrays


def augment_draws(key: jax.Array, batch: int, size: tuple[int, int], *, wrist: bool) -> dict[str, jax.Array]:
    """The numbers that augmax draws from one preprocessing key, a row a sample. All cameras share the key."""
    height, width = size
    limit = jnp.array([(height - int(height * 0.95)) / 2, (width - int(width * 0.95)) / 2])

    def geometry(key):
        crop, _, rotate = jax.random.split(key, 3)
        center = jax.random.uniform(crop, [2], minval=-limit, maxval=limit)
        five = np.deg2rad(5)
        return {"crop_center_yx": center, "theta_rad": jax.random.uniform(rotate, minval=-five, maxval=five)}

    def colours(key):
        (jitter,) = jax.random.split(key, 1)
        names = {"brightness": 0.3, "contrast": 0.4, "hue": 0.1, "saturation_ignored": 0.5}
        keys = jax.random.split(jitter, 5)
        amounts = {
            name: jax.random.uniform(k, minval=-limit, maxval=limit)
            for (name, limit), k in zip(names.items(), keys, strict=False)
        }
        return {**amounts, "jitter_applied": jax.random.bernoulli(jitter, 0.5)}

    def sample(key):
        if wrist:
            (colour,) = jax.random.split(key, 1)
            return colours(colour)
        first, colour = jax.random.split(key, 2)
        return {**geometry(first), **colours(colour)}

    return jax.vmap(sample)(jax.random.split(key, batch))


def sample_transforms(seed: int) -> Arrays:
    """All arrays of preprocess_transforms.npz."""
    rng = np.random.default_rng((seed, 7))
    arrays: Arrays = {}
    stats = {key: _statistics(rng, width) for key, width in (("state", 10), ("actions", 7))}
    for key, value in stats.items():
        arrays.update({f"stats/{key}/{name}": getattr(value, name) for name in STATISTICS})
    given = {
        "state": rng.uniform(-3, 3, 7).astype(np.float32),
        "actions": rng.uniform(-3, 3, (5, 7)).astype(np.float32),
    }
    wider = {"state": rng.uniform(-2, 2, 12), "actions": rng.uniform(-2, 2, (5, 12))}
    arrays.update({f"norm_in/{key}": value for key, value in given.items()})
    for mode, quantiles in (("zscore", False), ("quantile", True)):
        forward = transforms.Normalize(stats, use_quantiles=quantiles)(_copy(given))
        back = transforms.Unnormalize(stats, use_quantiles=quantiles)(_copy(wider))
        for key in given:
            arrays[f"normalize_{mode}/{key}"] = forward[key]
            arrays[f"unnorm_in_{mode}/{key}"], arrays[f"unnormalize_{mode}/{key}"] = wider[key], back[key]
    masks = {0: ((6, -1), 7, 7), 1: ((3,), 8, 8), 2: ((6, -1, 6, -1), 14, 16)}
    for case, (counts, state_width, action_width) in masks.items():
        mask = transforms.make_bool_mask(*counts)
        sample = {
            "state": rng.uniform(-2, 2, state_width).astype(np.float32),
            "actions": rng.uniform(-2, 2, (5, action_width)).astype(np.float32),
        }
        arrays[f"delta{case}/mask"] = np.asarray(mask)
        arrays.update({f"delta{case}/{key}": value for key, value in sample.items()})
        arrays[f"delta{case}/delta_out"] = transforms.DeltaActions(mask)(_copy(sample))["actions"]
        arrays[f"delta{case}/absolute_out"] = transforms.AbsoluteActions(mask)(_copy(sample))["actions"]
    narrow = {
        "state": rng.uniform(-2, 2, 7).astype(np.float32),
        "actions": rng.uniform(-2, 2, (5, 6)).astype(np.float32),
    }
    padded = transforms.PadStatesAndActions(32)(_copy(narrow))
    for key, value in narrow.items():
        arrays[f"pad/{key}_in"], arrays[f"pad/{key}_out"] = value, padded[key]
    for dtype in (np.float32, np.float64):
        states = np.concatenate([np.linspace(-1.3, 1.3, 521), np.linspace(-1, 1, 257), rng.uniform(-2, 2, 200)])
        states = states.astype(dtype)
        name = np.dtype(dtype).name
        arrays[f"discretize/{name}_in"], arrays[f"discretize/{name}_out"] = states, discretized(states)
    return arrays | _running(rng)


def discretized(states: np.ndarray) -> np.ndarray:
    """The bins that openpi's tokenizer writes into a prompt, read back from the text it hands to sentencepiece."""
    from openpi.models import tokenizer as tokenizer_module

    texts: list[str] = []

    class Recorder:
        def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
            texts.append(text)
            return [0]

    tokenizer = object.__new__(tokenizer_module.PaligemmaTokenizer)
    tokenizer._max_len, tokenizer._tokenizer = 1, Recorder()
    tokenizer.tokenize("", states)
    return np.array(texts[0].split("State: ")[1].split(";")[0].split(), dtype=np.int64)


def _copy(sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in sample.items()}  # some of openpi's transforms work in place


def _statistics(rng: np.random.Generator, width: int) -> normalize.NormStats:
    q01 = rng.uniform(-2, -0.5, width)
    values: dict[str, Any] = {
        "mean": rng.normal(size=width),
        "std": rng.uniform(0.1, 1, width),
        "q01": q01,
        "q99": q01 + rng.uniform(0.5, 4, width),
    }
    values["std"][0] = 0.0  # a joint that never moves
    values["q99"][1] = values["q01"][1]
    return normalize.NormStats(**values)


def _running(rng: np.random.Generator) -> Arrays:
    """RunningStats over batches of uneven sizes whose range keeps growing, and over 20 equal ones."""
    cuts = np.array([0, 2, 50, 51, 200, 201, 450, 600])
    data = rng.normal(size=(600, 6)) * np.linspace(0.5, 2, 600)[:, None]
    data[:, 4] = np.where(rng.random(600) < 0.5, -1.0, 1.0)  # a gripper
    data[:, 5] = 0.25
    arrays: Arrays = {"running/cuts": cuts}
    for dtype in ("float32", "float64"):
        values = data.astype(dtype)
        arrays[f"running/{dtype}/data"] = values
        streams = {
            "running": [values[a:b] for a, b in pairwise(cuts)],
            "running3d": list(values.reshape(20, 1, -1, values.shape[-1])),
        }
        for stream, batches in streams.items():
            running = normalize.RunningStats()
            for batch in batches:
                running.update(batch)
            found = running.get_statistics()
            arrays.update({f"{stream}/{dtype}/{name}": getattr(found, name) for name in STATISTICS})
    return arrays
