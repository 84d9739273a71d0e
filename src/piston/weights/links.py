"""Every checkpoint layout's tensors and their places in our model: tables, read in both directions.

JAX names come from model/weights.py. openpi-PyTorch names are Hugging Face's, LeRobot's the same behind `model.`.
RLinf keeps openpi's JAX layout in its FFN and stacks q, k, v of the vision tower.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from piston.config.schema import GemmaConfig, ModelConfig
from piston.model.pi0 import Pi0
from piston.model.weights import entries

Ref = tuple[str, int | None]  # a tensor of a file, or one layer of a stacked one


@dataclass(frozen=True)
class Link:
    """Tensors of a file ↔ parameters of ours: joined along axis 0, rearranged by `pattern`, split along axis 0."""

    theirs: tuple[Ref, ...]
    ours: tuple[str, ...]
    pattern: str = ""  # einops, their side first; empty: same layout
    axes: tuple[tuple[str, int], ...] = ()

    def to_ours(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return _pieces(self._arranged(_joined(tensors), self.pattern), len(self.ours))

    def to_theirs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        left, _, right = self.pattern.partition("->")
        inverse = f"{right} -> {left}" if self.pattern else ""
        return _pieces(self._arranged(_joined(tensors), inverse), len(self.theirs))

    def _arranged(self, tensor: Tensor, pattern: str) -> Tensor:
        return rearrange(tensor, pattern, **dict(self.axes)) if pattern else tensor


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _pieces(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor] if count == 1 else list(tensor.chunk(count))


def our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its shape; no memory is used."""
    return {name: tuple(p.shape) for name, p in Pi0.on_meta(config).named_parameters()}


# --- the layouts -----------------------------------------------------------------------------------------------------


def piston_links(config: ModelConfig) -> Iterator[Link]:
    for name in our_shapes(config):
        yield _same(name, name)


def jax_links(config: ModelConfig) -> Iterator[Link]:
    """openpi's JAX arrays; layers of a tower are stacked on the first axis."""
    for entry in entries(config):
        for i in range(entry.layers or 1):
            layer = i if entry.layers else None
            yield Link(((entry.jax, layer),), (entry.ours.format(i=i),), entry.pattern, entry.axes)


def paligemma_links(config: ModelConfig) -> Iterator[Link]:
    """The arrays of PaliGemma's own npz: openpi's vision tower and VLM, without the action expert and the heads."""
    for link in jax_links(config):
        (name, layer), part = link.theirs[0], link.ours[0]
        if part.startswith(("siglip.", "gemma.")) and "suffix" not in part and ".lora." not in part:
            renamed = ("params/" + name.removeprefix("PaliGemma/"), layer)
            yield Link((renamed,), link.ours, link.pattern, link.axes)


VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
EMBEDDING = f"{LANGUAGE}.embed_tokens.weight"
TIED_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"  # the embedding under the name that files mostly use
UNUSED_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"  # never evaluated, never trained


def _same(theirs: str, ours: str) -> Link:
    return Link(((theirs, None),), (ours,))


def _affine(theirs: str, ours: str) -> Iterator[Link]:
    for kind in ("weight", "bias"):
        yield _same(f"{theirs}.{kind}", f"{ours}.{kind}")


def _heads(config: ModelConfig) -> Iterator[Link]:
    names = ["action_in_proj", "action_out_proj"]
    names += (
        ["time_mlp_in", "time_mlp_out"] if config.pi05 else ["state_proj", "action_time_mlp_in", "action_time_mlp_out"]
    )
    for name in names:
        yield from _affine(name, name)


def openpi_pytorch_links(config: ModelConfig) -> Iterator[Link]:
    """openpi's PyTorch names. The embedding stands under its tied head's name, as openpi's own files have it."""
    yield from _hf_vision(config)
    yield _same(TIED_HEAD, "gemma.embedding")
    yield _same(f"{LANGUAGE}.norm.weight", "gemma.prefix_norm.scale")
    yield from _hf_norm(f"{EXPERT}.norm", "gemma.suffix_norm", adaptive=config.pi05)
    for theirs, part, gemma, adaptive in (
        (LANGUAGE, "prefix", config.paligemma, False),
        (EXPERT, "suffix", config.action_expert, config.pi05),
    ):
        for i in range(gemma.depth):
            yield from _hf_layer(f"{theirs}.layers.{i}", f"gemma.blocks.{i}.{part}", adaptive=adaptive)
    yield from _heads(config)


def lerobot_links(config: ModelConfig) -> Iterator[Link]:
    """LeRobot's names: openpi's PyTorch ones behind `model.`."""
    for link in openpi_pytorch_links(config):
        yield Link(tuple((f"model.{name}", i) for name, i in link.theirs), link.ours, link.pattern, link.axes)


def _hf_vision(config: ModelConfig) -> Iterator[Link]:
    height, width = config.siglip.patch_size
    patch, axes = f"{VISION}.embeddings.patch_embedding", (("y", height), ("x", width))
    yield Link(((f"{patch}.weight", None),), ("siglip.patch_embed.weight",), "v c y x -> v (y x c)", axes)
    yield _same(f"{patch}.bias", "siglip.patch_embed.bias")
    yield _same(f"{VISION}.embeddings.position_embedding.weight", "siglip.pos_embedding")
    names = {
        "layer_norm1": "norm_attn", "layer_norm2": "norm_mlp", "self_attn.q_proj": "q", "self_attn.k_proj": "k",
        "self_attn.v_proj": "v", "self_attn.out_proj": "out", "mlp.fc1": "fc1", "mlp.fc2": "fc2",
    }  # fmt: skip
    for i in range(config.siglip.depth):
        for theirs, ours in names.items():
            yield from _affine(f"{VISION}.encoder.layers.{i}.{theirs}", f"siglip.blocks.{i}.{ours}")
    yield from _affine(f"{VISION}.post_layernorm", "siglip.norm")
    yield from _affine(PROJECTOR, "siglip.head")


def _hf_norm(theirs: str, ours: str, *, adaptive: bool) -> Iterator[Link]:
    if adaptive:
        yield from _affine(f"{theirs}.dense", f"{ours}.modulation")
    else:
        yield _same(f"{theirs}.weight", f"{ours}.scale")


def _hf_layer(theirs: str, ours: str, *, adaptive: bool) -> Iterator[Link]:
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    yield _same(f"{attention}.q_proj.weight", f"{ours}.q.weight")
    yield _pair(f"{attention}.k_proj.weight", f"{attention}.v_proj.weight", f"{ours}.kv.weight")
    yield _same(f"{attention}.o_proj.weight", f"{ours}.o.weight")
    yield _pair(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", f"{ours}.gate_up.weight")
    yield _same(f"{mlp}.down_proj.weight", f"{ours}.down.weight")
    yield from _hf_norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm", adaptive=adaptive)
    yield from _hf_norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", adaptive=adaptive)


def _pair(first: str, second: str, ours: str) -> Link:
    return Link(((first, None), (second, None)), (ours,))


def rlinf_links(config: ModelConfig) -> Iterator[Link]:
    """RLinf's own π0 layout (openpi_rlinf)."""
    yield from _rlinf_vision(config)
    yield _same("llm.embedder.embedding.weight", "gemma.embedding")
    yield _same("llm.final_norms.0.scale", "gemma.prefix_norm.scale")
    yield from _rlinf_norm("llm.final_norms.1", "gemma.suffix_norm", adaptive=config.pi05)
    for index, part, gemma, adaptive in (
        (0, "prefix", config.paligemma, False),
        (1, "suffix", config.action_expert, config.pi05),
    ):
        for i in range(gemma.depth):
            yield from _rlinf_layer(f"llm.layers.{i}", index, f"gemma.blocks.{i}.{part}", gemma, adaptive=adaptive)
    yield from _heads(config)


def _rlinf_vision(config: ModelConfig) -> Iterator[Link]:
    height, width = config.siglip.patch_size
    axes = (("y", height), ("x", width))
    yield Link((("img.stem.weight", None),), ("siglip.patch_embed.weight",), "v c y x -> v (y x c)", axes)
    yield _same("img.stem.bias", "siglip.patch_embed.bias")
    yield Link((("img.pos_embedding", None),), ("siglip.pos_embedding",), "1 p v -> p v")
    for i in range(config.siglip.depth):
        layer, ours = f"img.encoder.layers.{i}", f"siglip.blocks.{i}"
        for kind in ("weight", "bias"):
            qkv = tuple(f"{ours}.{name}.{kind}" for name in "qkv")
            yield Link(((f"{layer}.attn.in_proj_{kind}", None),), qkv)
        names = {"norm1": "norm_attn", "norm2": "norm_mlp", "attn.out_proj": "out", "mlp.fc1": "fc1", "mlp.fc2": "fc2"}
        for theirs, name in names.items():
            yield from _affine(f"{layer}.{theirs}", f"{ours}.{name}")
    yield from _affine("img.encoder.norm", "siglip.norm")
    yield from _affine("img.head", "siglip.head")


def _rlinf_norm(theirs: str, ours: str, *, adaptive: bool) -> Iterator[Link]:
    if adaptive:
        yield from _affine(f"{theirs}.ada_modulation", f"{ours}.modulation")
    else:
        yield _same(f"{theirs}.scale", f"{ours}.scale")


def _rlinf_layer(theirs: str, index: int, ours: str, gemma: GemmaConfig, *, adaptive: bool) -> Iterator[Link]:
    attention, mlp = f"{theirs}.attn", f"{theirs}.mlps.{index}"
    yield _same(f"{attention}.q_proj.{index}.weight", f"{ours}.q.weight")
    yield _pair(f"{attention}.k_proj.{index}.weight", f"{attention}.v_proj.{index}.weight", f"{ours}.kv.weight")
    yield _same(f"{attention}.o_proj.{index}.weight", f"{ours}.o.weight")
    yield Link(((f"{mlp}.w_gating", None),), (f"{ours}.gate_up.weight",), "t x f -> (t f) x", (("t", 2),))
    yield Link(((f"{mlp}.w_linear", None),), (f"{ours}.down.weight",), "f x -> x f")
    yield from _rlinf_norm(f"{theirs}.pre_attention_norms.{index}", f"{ours}.attn_norm", adaptive=adaptive)
    yield from _rlinf_norm(f"{theirs}.pre_ffw_norms.{index}", f"{ours}.mlp_norm", adaptive=adaptive)


LAYOUTS: dict[str, Callable[[ModelConfig], Iterator[Link]]] = {
    "openpi-jax": jax_links,
    "openpi-pytorch": openpi_pytorch_links,
    "lerobot": lerobot_links,
    "piston": piston_links,
    "rlinf": rlinf_links,
    "paligemma": paligemma_links,
}
HOLDS_LORA = frozenset({"openpi-jax", "piston"})  # the others have no place for adapters


def their_shapes(config: ModelConfig, links: Sequence[Link]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layout and its shape, stacked ones whole; no memory is used."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in our_shapes(config).items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        for (name, layer), tensor in zip(link.theirs, link.to_theirs([ours[n] for n in link.ours]), strict=True):
            shapes[name] = tuple(tensor.shape) if layer is None else (layer + 1, *tensor.shape)
    return shapes
