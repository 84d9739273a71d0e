"""Random parameters, observations, noise and times. Every value follows from the seed and the architecture.

The parameters are not openpi's initialisation, which zeroes the vision head and every adaRMS modulation and so hides
most mistakes: everything is drawn, scaled so that each parameter moves the loss.
"""

import math
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def parameters(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    """float32 arrays by path, drawn in sorted order of the paths."""
    rng = np.random.default_rng(seed)
    return {path: _parameter(path, shapes[path], rng) for path in sorted(shapes)}


def _parameter(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    *_, module, name = path.split("/")
    mean = 1.0 if name == "scale" and module.startswith(("LayerNorm", "encoder_norm")) else 0.0
    std = {"scale": 0.2, "bias": 0.1, "pos_embedding": 0.3, "input_embedding": 0.1}.get(name)
    if name == "bias" and "norm" in path and "Dense" in module:  # adaRMS: scale, shift and gate away from zero
        std = 0.3
    if std is None:
        std = _matrix_std(path, name, shape)
    return (mean + std * rng.standard_normal(shape)).astype(np.float32)


def _matrix_std(path: str, name: str, shape: tuple[int, ...]) -> float:
    """1/sqrt(fan in), so that activations keep their size; the flow heads get twice that."""
    if "lora_" in name:
        # A alone keeps the size, B halves it: the adapter is as strong as a trained one, not as strong as its base.
        return 0.5 / math.sqrt(shape[-2])
    if "attn_vec_einsum" in path or (path.endswith("out/kernel") and "Attention" in path):
        return 1 / math.sqrt(shape[-3] * shape[-2])
    if "MultiHeadDotProductAttention" in path:
        return 1 / math.sqrt(shape[-3])
    if path.endswith("embedding/kernel"):
        return 1 / math.sqrt(math.prod(shape[:-1]))
    if path.startswith(("action_in", "time_mlp", "state_proj", "action_time")):
        return 2 / math.sqrt(shape[-2])
    return 1 / math.sqrt(shape[-2])


def smooth_images(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """uint8 [..., H, W, 3]: a few waves and noise, so that neighbours correlate and the whole range occurs."""
    *lead, height, width, _ = shape
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    phase = rng.uniform(0, 2 * np.pi, (*lead, 1, 1, 3))
    fy, fx = rng.uniform(-3, 3, (2, *lead, 1, 1, 3))
    wave = 0.5 + 0.45 * np.sin(2 * np.pi * (fy * y[..., None] + fx * x[..., None]) + phase)
    return (255 * np.clip(wave + 0.1 * rng.standard_normal(shape), 0, 1)).astype(np.uint8)


def unit_range(images: np.ndarray) -> np.ndarray:
    """uint8 → float32 in [-1, 1], rounded as openpi's Observation.from_dict does."""
    return images.astype(np.float32) / np.float32(255.0) * np.float32(2.0) - np.float32(1.0)


def flow_times(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(beta, time): time = beta·0.999 + 0.001, with betas for which a fused multiply-add rounds to the same float32.

    Holds 0 and 1 exactly where the shape has room for them.
    """
    beta = rng.beta(1.5, 1.0, shape).astype(np.float32)
    flat = beta.reshape(-1)
    if flat.size > 2:
        flat[1], flat[2] = 1.0, 0.0
    scale, shift = np.float32(0.999), np.float32(0.001)
    for i in range(flat.size):
        while (flat[i] * scale + shift) != np.float32(np.float64(flat[i]) * np.float64(scale) + np.float64(shift)):
            flat[i] = np.nextafter(flat[i], np.float32(0.5))
    return beta, (beta * scale + shift).astype(np.float32)


def prompts(lengths: list[int], max_len: int, vocab: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids [n, L], 0 where padded, and their mask."""
    mask = np.arange(max_len)[None] < np.array(lengths)[:, None]
    ids = rng.integers(1, vocab, (len(lengths), max_len)).astype(np.int32)
    return np.where(mask, ids, 0).astype(np.int32), mask


def observations(
    arch: dict[str, Any], entry: dict[str, Any], rng: np.random.Generator, lead: tuple[int, ...]
) -> Arrays:
    """Batches of inputs with leading axes `lead` before the batch: images as uint8, state down to −1.6, actions."""
    batch = entry["batch"]
    arrays: Arrays = {}
    for camera in arch["image_keys"]:
        arrays[f"images_u8/{camera}"] = smooth_images((*lead, batch, *arch["image_resolution"], 3), rng)
        mask = np.array(entry["image_masks"][camera], dtype=bool)
        arrays[f"image_masks/{camera}"] = np.broadcast_to(mask, (*lead, batch)).copy()
    arrays["state"] = rng.uniform(-1.6, 1.2, (*lead, batch, arch["action_dim"])).astype(np.float32)
    repeats = math.prod(lead)
    ids, valid = prompts(list(entry["prompt_lens"]) * repeats, arch["max_token_len"], arch["vocab"], rng)
    shape = (*lead, batch, arch["max_token_len"])
    arrays["tokenized_prompt"], arrays["tokenized_prompt_mask"] = ids.reshape(shape), valid.reshape(shape)
    chunk = (*lead, batch, arch["action_horizon"], arch["action_dim"])
    arrays["actions"] = (0.6 * rng.standard_normal(chunk)).astype(np.float32)
    return arrays


def inputs(arch: dict[str, Any], entry: dict[str, Any], seed: int) -> Arrays:
    """Everything a model set needs except parameters, under its bundle names; images float32 in [-1, 1]."""
    rng = np.random.default_rng((seed, 1))
    drawn = observations(arch, entry, rng, ())
    arrays = {
        name.replace("images_u8/", "images/"): unit_range(array) if name.startswith("images_u8/") else array
        for name, array in drawn.items()
    }
    chunk = arrays["actions"].shape
    arrays["noise"] = rng.standard_normal(chunk).astype(np.float32)
    arrays["sample_noise"] = rng.standard_normal(chunk).astype(np.float32)
    arrays["beta"], arrays["time"] = flow_times((entry["batch"],), rng)
    return arrays


def given_inputs(arch: dict[str, Any], entry: dict[str, Any]) -> Arrays:
    """A batch from a file, under the bundle's names; draws noise and times where the file has none.

    Images may be uint8 as images_u8/<camera>, or float32 in [-1, 1] as images/<camera>.
    """
    with np.load(entry["inputs"], allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for camera in arch["image_keys"]:
        if f"images/{camera}" not in arrays and f"images_u8/{camera}" in arrays:
            arrays[f"images/{camera}"] = unit_range(arrays.pop(f"images_u8/{camera}"))
    names = [f"{kind}/{camera}" for kind in ("images", "image_masks") for camera in arch["image_keys"]]
    names += ["state", "tokenized_prompt", "tokenized_prompt_mask", "actions"]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise SystemExit(f"{entry['inputs']} has no array {missing[0]!r}; expected {names}")
    rng = np.random.default_rng((entry["seed"], 1))
    chunk = arrays["actions"].shape
    drawn = {name: rng.standard_normal(chunk).astype(np.float32) for name in ("noise", "sample_noise")}
    drawn["beta"], drawn["time"] = flow_times(chunk[:1], rng)
    if "beta" not in arrays:
        arrays.pop("time", None)  # openpi derives the time from its draw
    return {**drawn, **{name: arrays[name] for name in arrays if name in (*names, *drawn)}}
