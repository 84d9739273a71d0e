"""openpi's JAX model at any size, built from a bundle manifest's `arch` entry; the installed package is not edited.

openpi fixes the vision tower, the Gemma sizes, the vocabulary, the image size and the camera names in its modules.
`install` replaces those names at run time. Packages that openpi imports and this use of it never calls are stood in for
by empty modules, so that they need not be installed.
"""

import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

Params = dict[str, np.ndarray]


class _Unused(types.ModuleType):
    """An importable module whose every attribute is another such thing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in(*names: str) -> None:
    for name in names:
        module = _Unused(name)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


_stand_in("torch", "torch.nn", "torch.nn.functional", "safetensors", "safetensors.torch", "transformers")
_stand_in("openpi.models_pytorch", "openpi.models_pytorch.pi0_pytorch", "openpi.shared.download")
_stand_in("openpi.models.utils", "openpi.models.utils.fsq_tokenizer")

from openpi.models import gemma, lora, pi0, pi0_config, siglip  # noqa: E402
from openpi.models import model as model_module  # noqa: E402


def _gemma_config(sizes: dict[str, int], adapters: dict[str, Any] | None) -> gemma.Config:
    configs = {
        part: lora.LoRAConfig(rank=a["rank"], alpha=a["alpha"], rslora=a.get("rslora", False))
        for part, a in (adapters or {}).items()
        if a
    }
    names = ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
    return gemma.Config(**{name: sizes[name] for name in names}, lora_configs=configs)


def install(arch: dict[str, Any], dtype: str) -> pi0_config.Pi0Config:
    """Makes openpi build models of this architecture from now on; returns the configuration that does."""
    sizes = {}
    for part in ("vlm", "expert"):
        adapters = arch.get(f"lora_{part}")
        # openpi's freeze rule looks for "lora" in the variant's name
        sizes[part + ("_lora" if adapters else "")] = _gemma_config(arch[part], adapters)
    tower = {name: arch["siglip"][name] for name in ("width", "depth", "mlp_dim", "num_heads")}
    tower["patch_size"] = tuple(arch["siglip"]["patch_size"])
    gemma.get_config = sizes.__getitem__
    gemma.PALIGEMMA_VOCAB_SIZE = arch["vocab"]
    siglip.decode_variant = lambda variant: tower
    resolution, keys = tuple(arch["image_resolution"]), tuple(arch["image_keys"])
    model_module.IMAGE_RESOLUTION, model_module.IMAGE_KEYS = resolution, keys
    model_module.preprocess_observation.__kwdefaults__.update(image_keys=keys, image_resolution=resolution)
    vlm, expert = sizes
    return pi0_config.Pi0Config(
        dtype=dtype,
        paligemma_variant=vlm,
        action_expert_variant=expert,
        action_dim=arch["action_dim"],
        action_horizon=arch["action_horizon"],
        max_token_len=arch["max_token_len"],
        pi05=arch["pi05"],
    )


class Model:
    """An architecture in one compute dtype: a function from parameters (flat, by path) to openpi's module."""

    def __init__(self, arch: dict[str, Any], dtype: str) -> None:
        self.config = install(arch, dtype)
        self.graph, self.state = nnx.split(nnx.eval_shape(self.config.create, jax.random.key(0)))
        self.shapes = {k: v.shape for k, v in flatten(self.state.to_pure_dict()).items()}

    def build(self, params: dict[str, jax.Array]) -> pi0.Pi0:
        state = jax.tree.map(lambda leaf: leaf, self.state)
        state.replace_by_pure_dict(traverse_util.unflatten_dict(params, sep="/"))
        return nnx.merge(self.graph, state)

    def frozen(self) -> set[str]:
        """Paths that openpi's freeze filter selects: none without LoRA."""
        return set(flatten(self.state.filter(self.config.get_freeze_filter()).to_pure_dict()))


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def observation(arch: dict[str, Any], inputs: dict[str, np.ndarray]) -> model_module.Observation:
    """An Observation from arrays by their bundle names; images float32 in [-1, 1]."""
    images = {camera: jnp.asarray(inputs[f"images/{camera}"]) for camera in arch["image_keys"]}
    return model_module.Observation(
        images=images,
        image_masks={camera: jnp.asarray(inputs[f"image_masks/{camera}"]) for camera in images},
        state=jnp.asarray(inputs["state"]),
        tokenized_prompt=jnp.asarray(inputs["tokenized_prompt"]),
        tokenized_prompt_mask=jnp.asarray(inputs["tokenized_prompt_mask"]),
    )


def restored(checkpoint: str, shapes: dict[str, tuple[int, ...]]) -> Params:
    """An openpi checkpoint's parameters by path, float32; every shape must be the architecture's."""
    tree = model_module.restore_params(checkpoint, restore_type=np.ndarray, dtype=jnp.float32)
    params = {path: np.asarray(array) for path, array in flatten(tree).items()}
    found = {path: array.shape for path, array in params.items()}
    if found != shapes:
        differing = sorted(path for path in found.keys() | shapes.keys() if found.get(path) != shapes.get(path))
        first = differing[0]
        raise SystemExit(
            f"{len(differing)} parameters of {checkpoint} do not fit the architecture, first {first}: "
            f"the checkpoint has {found.get(first)}, the architecture {shapes.get(first)}"
        )
    return params
