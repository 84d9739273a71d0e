"""Reads a golden bundle: a directory of arrays recorded from openpi's JAX code, described by its MANIFEST.json.

A set is an architecture, its parameters and inputs (`<set>_inputs.npz`) and what the reference computed from them
(`<set>_float32.npz`, `<set>_bfloat16.npz`). A training-curve set names the model set it starts from.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from piston.batch import Observation
from piston.config.schema import GemmaConfig, LoraConfig, ModelConfig, SiglipConfig

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
KINDS = {"image_masks": "b", "tokenized_prompt_mask": "b", "tokenized_prompt": "iu"}  # numpy's; all else is float
Arrays = Mapping[str, np.ndarray]


class NamedArrays(dict[str, np.ndarray]):
    """Arrays of one file by name; asking for one that is not there is a ValueError that names the file."""

    def __init__(self, source: str, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.source = source

    def __missing__(self, name: str) -> np.ndarray:
        raise ValueError(
            f"bundle file {self.source} has no array {name!r}; it holds {len(self)} arrays; "
            "expected the names of the golden format: record the bundle again"
        )


def read_npz(path: Path) -> NamedArrays:
    """Every array of a .npz file. A damaged or missing file, and numbers that are not finite, are a ValueError."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = NamedArrays(str(path), {name: archive[name] for name in archive.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"bundle file {path} cannot be read: {error}; expected a .npz archive of plain arrays; record it again"
        ) from error
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(
                f"array {name!r} of bundle file {path} holds {int((~np.isfinite(array)).sum())} values that are not "
                "finite; expected numbers that can be compared; record the bundle again"
            )
    return arrays


def under(arrays: Arrays, prefix: str) -> NamedArrays:
    """The arrays whose name starts with `prefix/`, without it."""
    source = f"{getattr(arrays, 'source', 'results')}:{prefix}/"
    kept = {k.removeprefix(prefix + "/"): v for k, v in arrays.items() if k.startswith(prefix + "/")}
    return NamedArrays(source, kept)


def _lora(entry: dict[str, Any] | None, kind: str) -> LoraConfig | None:
    if not entry or not entry.get(kind):
        return None
    part = entry[kind]
    return LoraConfig(rank=int(part["rank"]), alpha=float(part["alpha"]), rslora=bool(part.get("rslora", False)))


def _gemma(entry: dict[str, Any], lora: dict[str, Any] | None) -> GemmaConfig:
    sizes = {k: int(entry[k]) for k in ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")}
    return GemmaConfig(**sizes, lora_attn=_lora(lora, "attn"), lora_ffn=_lora(lora, "ffn"))


def model_config(arch: dict[str, Any], dtype: Dtype) -> ModelConfig:
    """Our configuration of a manifest's `arch` entry."""
    siglip = arch["siglip"]
    return ModelConfig(
        pi05=bool(arch["pi05"]),
        dtype=dtype,
        paligemma=_gemma(arch["vlm"], arch.get("lora_vlm")),
        action_expert=_gemma(arch["expert"], arch.get("lora_expert")),
        siglip=SiglipConfig(
            width=int(siglip["width"]),
            depth=int(siglip["depth"]),
            mlp_dim=int(siglip["mlp_dim"]),
            num_heads=int(siglip["num_heads"]),
            patch_size=(int(siglip["patch_size"][0]), int(siglip["patch_size"][1])),
        ),
        vocab_size=int(arch["vocab"]),
        image_size=(int(arch["image_resolution"][0]), int(arch["image_resolution"][1])),
        cameras=tuple(arch["image_keys"]),
        action_dim=int(arch["action_dim"]),
        action_horizon=int(arch["action_horizon"]),
        max_token_len=int(arch["max_token_len"]),
    )


def stacked_observation(arrays: Arrays, cameras: tuple[str, ...], images: Mapping[str, np.ndarray]) -> Observation:
    """An Observation from per-camera arrays: images float32 [B, H, W, 3] in [-1, 1] by camera."""
    masks = np.stack([arrays[f"image_masks/{c}"] for c in cameras], axis=1)
    return Observation(
        images=torch.from_numpy(np.stack([images[c] for c in cameras], axis=1)),
        image_masks=torch.from_numpy(masks),
        state=torch.from_numpy(arrays["state"]),
        tokenized_prompt=torch.from_numpy(arrays["tokenized_prompt"].astype(np.int32)),
        tokenized_prompt_mask=torch.from_numpy(arrays["tokenized_prompt_mask"]),
    )


@dataclass(frozen=True)
class ModelSet:
    """One architecture with parameters, inputs and the reference's results."""

    root: Path
    name: str
    arch: dict[str, Any]

    def config(self, dtype: Dtype) -> ModelConfig:
        try:
            return model_config(self.arch, dtype)
        except KeyError as error:
            raise ValueError(
                f"set {self.name} of {self.root / 'MANIFEST.json'} has no `arch` field {error}; "
                "expected the fields of the golden format; record the bundle again"
            ) from error
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"`arch` of set {self.name} in {self.root / 'MANIFEST.json'} describes no model: {error}; "
                "expected the numbers of the golden format; correct it or record the bundle again"
            ) from error

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """The compute dtypes that the bundle has results for."""
        return tuple(d for d in DTYPES if (self.root / f"{self.name}_{d}.npz").exists())

    @cached_property
    def inputs(self) -> NamedArrays:
        """Parameters and inputs, checked against the shapes of the architecture."""
        arrays = read_npz(self.root / f"{self.name}_inputs.npz")
        self._check(arrays)
        return arrays

    def _check(self, arrays: NamedArrays) -> None:
        config = self.config("float32")
        batch = arrays["actions"].shape[0] if arrays["actions"].ndim else 0
        chunk = (batch, config.action_horizon, config.action_dim)
        shapes = {
            **{f"images/{c}": (batch, *config.image_size, 3) for c in config.cameras},
            **{f"image_masks/{c}": (batch,) for c in config.cameras},
            **{name: chunk for name in ("actions", "noise", "sample_noise")},
            "state": (batch, config.action_dim),
            "time": (batch,),
            "tokenized_prompt": (batch, config.max_token_len),
            "tokenized_prompt_mask": (batch, config.max_token_len),
        }
        if batch < 1:
            raise ValueError(
                f"array 'actions' of bundle file {arrays.source} has shape {arrays['actions'].shape}; expected "
                "at least one sample; record the bundle again"
            )
        for name, shape in shapes.items():
            if arrays[name].dtype.kind not in KINDS.get(name.split("/")[0], "f"):
                raise ValueError(
                    f"array {name!r} of bundle file {arrays.source} has dtype {arrays[name].dtype}; expected "
                    "float32, bool for masks, int32 for token ids; record the bundle again"
                )
            if arrays[name].shape != shape:
                raise ValueError(
                    f"array {name!r} of bundle file {arrays.source} has shape {arrays[name].shape}, its architecture "
                    f"in MANIFEST.json asks for {shape}; correct `arch` of set {self.name!r} or record it again"
                )

        tokens = arrays["tokenized_prompt"]
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise ValueError(
                f"array 'tokenized_prompt' of bundle file {arrays.source} has ids from {tokens.min()} to "
                f"{tokens.max()}; expected 0 to {config.vocab_size - 1}, `vocab` of set {self.name!r} in "
                "MANIFEST.json; correct it or record the bundle again"
            )

    def reference(self, dtype: Dtype) -> NamedArrays:
        return read_npz(self.root / f"{self.name}_{dtype}.npz")

    @cached_property
    def params(self) -> NamedArrays:
        """JAX path → array."""
        return under(self.inputs, "params")

    def observation(self) -> Observation:
        cameras = self.config("float32").cameras
        return stacked_observation(self.inputs, cameras, under(self.inputs, "images"))

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.inputs[name])


@dataclass(frozen=True)
class CurveSet:
    """A recorded training run: its batches, noise, settings and curves."""

    root: Path
    name: str
    settings: dict[str, Any]
    base: ModelSet

    @cached_property
    def arrays(self) -> NamedArrays:
        return read_npz(self.root / f"{self.name}.npz")


@dataclass(frozen=True)
class Bundle:
    """All sets of one directory."""

    root: Path
    models: tuple[ModelSet, ...]
    curves: tuple[CurveSet, ...]


def open_bundle(root: Path) -> Bundle:
    """Reads MANIFEST.json; raises ValueError if it is missing, damaged or holds no set that can be compared."""
    path = root / "MANIFEST.json"
    try:
        sets = dict(json.loads(path.read_text())["sets"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"no MANIFEST.json in {root}; expected a bundle of the golden format; "
            "give --bundle the directory that holds MANIFEST.json"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a bundle manifest ({error!r}); expected JSON with an entry `sets`; "
            "copy or record the bundle again"
        ) from error
    for name, entry in sets.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("arch", {}), dict):
            raise ValueError(
                f"set {name} of {path} is {json.dumps(entry)[:80]}; expected an object, and in it `arch` as an object; "
                "correct the manifest or record the bundle again"
            )
    lost = [f for entry in sets.values() for f in entry.get("files", ()) if not (root / f).exists()]
    if lost:
        raise ValueError(
            f"{path} lists files that are not in {root}: {', '.join(lost)}; expected all of them, since what is not "
            "compared proves nothing: copy the bundle again, or take the set out of the manifest"
        )
    models = {
        name: ModelSet(root, name, entry["arch"])
        for name, entry in sets.items()
        if "arch" in entry and (root / f"{name}_inputs.npz").exists()
    }
    curves = []
    for name, entry in sets.items():
        if "train_curve" not in name or not (root / f"{name}.npz").exists():
            continue
        if entry.get("base") not in models:
            raise ValueError(
                f"curve set {name} of {path} starts from set {entry.get('base')!r}, which this bundle lacks; "
                f"it has {sorted(models)}: add that set's _inputs.npz, or correct `base`"
            )
        curves.append(CurveSet(root, name, entry, models[entry["base"]]))
    if not models and not curves:
        raise ValueError(f"{path} names no set with files in {root}; expected <set>_inputs.npz; check the directory")
    return Bundle(root, tuple(models.values()), tuple(curves))
