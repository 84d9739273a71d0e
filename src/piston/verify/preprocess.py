"""What happens to a sample before the model, against a bundle's `preprocess_*` files.

Resizing with Pillow, transforms, state bins and statistics are numpy in the reference too, and must be equal to the
last bit; resizing and augmentation on the device are float32 arithmetic and get a tolerance.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from piston.batch import AugmentDraws
from piston.data.augment import augment, to_unit_range
from piston.data.norm import KeyStats, normalize, unnormalize
from piston.data.prompt import discretize_state
from piston.data.resize import pillow_resize_with_pad, resize_with_pad
from piston.data.stats import RunningStats
from piston.data.transforms import pad_to_dim
from piston.data.units import absolute_actions, delta_actions
from piston.verify.bundle import NamedArrays, read_npz, under
from piston.verify.report import Row

AUGMENT_TOLERANCE = 2e-5  # absolute, images in [-1, 1]; numpy re-implementations of augmax reach 1.4e-5
DEVICE_RESIZE_TOLERANCE = 1e-5  # absolute, images in [-1, 1]
STATISTICS = ("mean", "std", "q01", "q99")


def verify_preprocess(root: Path) -> list[Row]:
    """Rows for every preprocess file the directory has; none where it has none."""
    parts = {
        "preprocess_resize.npz": _resize,
        "preprocess_observation_eval.npz": _observation,
        "preprocess_augment.npz": _augment,
        "preprocess_transforms.npz": _transforms,
    }
    return [row for name, part in parts.items() if (root / name).exists() for row in part(read_npz(root / name))]


def _equal(name: str, ours: np.ndarray, reference: np.ndarray) -> Row:
    differing = float("inf") if ours.shape != reference.shape else float((ours != reference).sum())
    return Row("preprocess", "float32", "preprocess", name, differing, 0.0, "differing entries")


def _near(name: str, ours: np.ndarray, reference: np.ndarray, tolerance: float) -> Row:
    error = float("inf") if ours.shape != reference.shape else float(np.abs(ours - reference).max())
    return Row("preprocess", "float32", "preprocess", name, error, tolerance, "max abs")


def _resize(arrays: NamedArrays) -> Iterator[Row]:
    for case in sorted({name.split("/")[0] for name in arrays}):
        one = under(arrays, case)
        image = one["in_uint8"]
        height, width = one["pil_uint8"].shape[:2]
        yield _equal(f"resize/{case}/pil_uint8", pillow_resize_with_pad(image, height, width), one["pil_uint8"])
        device = resize_with_pad(torch.from_numpy(image), height, width).numpy()
        # One grey level where the reference's float32 sum rounds the other way.
        yield _near(f"resize/{case}/jax_uint8", device.astype(np.int32), one["jax_uint8"].astype(np.int32), 1.0)
        if "jax_float32" in one:
            unit = resize_with_pad(to_unit_range(torch.from_numpy(image)), height, width).numpy()
            yield _near(f"resize/{case}/jax_float32", unit, one["jax_float32"], DEVICE_RESIZE_TOLERANCE)


def _observation(arrays: NamedArrays) -> Iterator[Row]:
    for camera, image in under(arrays, "in_images_u8").items():
        reference = arrays[f"out_images/{camera}"]
        ours = resize_with_pad(to_unit_range(torch.from_numpy(image)), reference.shape[1], reference.shape[2])
        yield _near(f"observation/{camera}", ours.numpy(), reference, DEVICE_RESIZE_TOLERANCE)


def _augment(arrays: NamedArrays) -> Iterator[Row]:
    for case in sorted({name.split("/")[0] for name in arrays}):
        one = under(arrays, case)
        for camera, image in under(one, "in_u8").items():
            ours = augment(to_unit_range(torch.from_numpy(image))[:, None], _draws(one, camera), (camera,))[:, 0]
            yield _near(f"augment/{case}/{camera}", ours.numpy(), one[f"out/{camera}"], AUGMENT_TOLERANCE)


def _draws(arrays: NamedArrays, camera: str) -> AugmentDraws:
    """The recorded draws of one camera; a wrist camera has no geometry."""
    recorded = under(arrays, f"params/{camera}")
    batch = recorded["hue"].shape[0]
    center = recorded.get("crop_center_yx", np.zeros((batch, 2), np.float32))
    theta = recorded.get("theta_rad", np.zeros(batch, np.float32))

    def one_camera(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)[:, None]

    return AugmentDraws(
        crop_center_yx=one_camera(center),
        theta=one_camera(theta),
        brightness=one_camera(recorded["brightness"]),
        contrast=one_camera(recorded["contrast"]),
        hue=one_camera(recorded["hue"]),
        jitter=one_camera(recorded["jitter_applied"]),
    )


def _transforms(arrays: NamedArrays) -> Iterator[Row]:
    for key in sorted({name.split("/")[1] for name in arrays if name.startswith("stats/")}):
        stats = KeyStats(*(arrays[f"stats/{key}/{name}"] for name in STATISTICS))
        for mode, quantiles in (("zscore", False), ("quantile", True)):
            ours = normalize(arrays[f"norm_in/{key}"], stats, use_quantiles=quantiles)
            yield _equal(f"normalize_{mode}/{key}", ours, arrays[f"normalize_{mode}/{key}"])
            back = unnormalize(arrays[f"unnorm_in_{mode}/{key}"], stats, use_quantiles=quantiles)
            yield _equal(f"unnormalize_{mode}/{key}", back, arrays[f"unnormalize_{mode}/{key}"])
    for case in sorted({name.split("/")[0] for name in arrays if name.startswith("delta")}):
        one = under(arrays, case)
        delta = delta_actions(one["actions"], one["state"], one["mask"])
        yield _equal(f"{case}/delta", delta, one["delta_out"])
        yield _equal(
            f"{case}/absolute", absolute_actions(one["actions"], one["state"], one["mask"]), one["absolute_out"]
        )
    for name in ("state", "actions", "wide_state"):
        if f"pad/{name}_in" in arrays:
            ours = pad_to_dim(arrays[f"pad/{name}_in"], 32)
            yield _equal(f"pad/{name}", ours, arrays[f"pad/{name}_out"])
    for name, states in under(arrays, "discretize").items():
        if name.endswith("_in"):
            out = name.removesuffix("_in") + "_out"
            yield _equal(f"discretize/{out}", discretize_state(states), arrays[f"discretize/{out}"])
    yield from _statistics(arrays)


def _statistics(arrays: NamedArrays) -> Iterator[Row]:
    for dtype in ("float32", "float64"):
        if f"running/{dtype}/data" not in arrays:
            continue
        data, cuts = arrays[f"running/{dtype}/data"], arrays["running/cuts"]
        streams = {
            "running": [data[a:b] for a, b in pairwise(cuts)],
            "running3d": list(data.reshape(20, 1, -1, data.shape[-1])),
        }
        for stream, batches in streams.items():
            running = RunningStats()
            for batch in batches:
                running.update(batch)
            found = running.statistics()
            for name in STATISTICS:
                yield _equal(f"{stream}/{dtype}/{name}", getattr(found, name), arrays[f"{stream}/{dtype}/{name}"])
