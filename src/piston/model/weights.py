"""Name and shape maps between openpi's JAX parameters and ours; strict both ways. Tables, not code.

Source: the parameter tree of openpi at commit 15a9616. JAX stacks the layers of a tower on a leading axis; here it is a
tensor a layer.
Gradients, moments and EMA map the same way as parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from piston.config.schema import GemmaConfig, ModelConfig


@dataclass(frozen=True)
class Entry:
    """One JAX array and its place in our model. `pattern` is einops, JAX side first; `{i}` in `ours` is the layer."""

    jax: str
    ours: str
    pattern: str = ""  # empty: same layout
    axes: tuple[tuple[str, int], ...] = ()
    layers: int = 0  # 0: not stacked

    def to_ours(self, array: Tensor) -> dict[str, Tensor]:
        slices = array.unbind(0) if self.layers else (array,)
        names = [self.ours.format(i=i) for i in range(max(self.layers, 1))]
        return {
            n: (rearrange(s, self.pattern, **dict(self.axes)) if self.pattern else s)
            for n, s in zip(names, slices, strict=True)
        }

    def to_jax(self, state: Mapping[str, Tensor]) -> Tensor:
        left, _, right = self.pattern.partition("->")
        inverse = f"{right} -> {left}"
        names = [self.ours.format(i=i) for i in range(max(self.layers, 1))]
        slices = [rearrange(state[n], inverse, **dict(self.axes)) if self.pattern else state[n] for n in names]
        return torch.stack(slices) if self.layers else slices[0]


TRANSPOSE = "i o -> o i"


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every parameter of the model, once."""
    yield from _siglip(config)
    yield Entry("PaliGemma/llm/embedder/input_embedding", "gemma.embedding")
    yield Entry("PaliGemma/llm/final_norm/scale", "gemma.prefix_norm.scale")
    yield from _norm("PaliGemma/llm/final_norm_1", "gemma.suffix_norm", adaptive=config.pi05, layers=0)
    for suffix, part, gemma, adaptive in (
        ("", "prefix", config.paligemma, False),
        ("_1", "suffix", config.action_expert, config.pi05),
    ):
        yield from _expert(suffix, f"gemma.blocks.{{i}}.{part}", gemma, adaptive=adaptive)
    heads = ["action_in_proj", "action_out_proj"]
    heads += (
        ["time_mlp_in", "time_mlp_out"] if config.pi05 else ["state_proj", "action_time_mlp_in", "action_time_mlp_out"]
    )
    for name in heads:
        yield from _dense(name, name, layers=0)


def _dense(jax: str, ours: str, *, layers: int) -> Iterator[Entry]:
    yield Entry(f"{jax}/kernel", f"{ours}.weight", TRANSPOSE, layers=layers)
    yield Entry(f"{jax}/bias", f"{ours}.bias", layers=layers)


def _norm(jax: str, ours: str, *, adaptive: bool, layers: int) -> Iterator[Entry]:
    if adaptive:
        yield from _dense(f"{jax}/Dense_0", f"{ours}.modulation", layers=layers)
    else:
        yield Entry(f"{jax}/scale", f"{ours}.scale", layers=layers)


def _siglip(config: ModelConfig) -> Iterator[Entry]:
    img, block, depth = "PaliGemma/img", "PaliGemma/img/Transformer/encoderblock", config.siglip.depth
    (height, width), heads = config.siglip.patch_size, (("h", config.siglip.num_heads),)
    yield Entry(
        f"{img}/embedding/kernel", "siglip.patch_embed.weight", "y x c v -> v (y x c)", (("y", height), ("x", width))
    )
    yield Entry(f"{img}/embedding/bias", "siglip.patch_embed.bias")
    yield Entry(f"{img}/pos_embedding", "siglip.pos_embedding", "1 p v -> p v")
    for i, norm in enumerate(("norm_attn", "norm_mlp")):
        yield Entry(f"{block}/LayerNorm_{i}/scale", f"siglip.blocks.{{i}}.{norm}.weight", layers=depth)
        yield Entry(f"{block}/LayerNorm_{i}/bias", f"siglip.blocks.{{i}}.{norm}.bias", layers=depth)
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for jax, ours in (("query", "q"), ("key", "k"), ("value", "v")):
        yield Entry(f"{attention}/{jax}/kernel", f"siglip.blocks.{{i}}.{ours}.weight", "i h e -> (h e) i", heads, depth)
        yield Entry(f"{attention}/{jax}/bias", f"siglip.blocks.{{i}}.{ours}.bias", "h e -> (h e)", heads, depth)
    yield Entry(f"{attention}/out/kernel", "siglip.blocks.{i}.out.weight", "h e o -> o (h e)", heads, depth)
    yield Entry(f"{attention}/out/bias", "siglip.blocks.{i}.out.bias", layers=depth)
    for i in range(2):
        yield from _dense(f"{block}/MlpBlock_0/Dense_{i}", f"siglip.blocks.{{i}}.fc{i + 1}", layers=depth)
    yield Entry(f"{img}/Transformer/encoder_norm/scale", "siglip.norm.weight")
    yield Entry(f"{img}/Transformer/encoder_norm/bias", "siglip.norm.bias")
    yield from _dense(f"{img}/head", "siglip.head", layers=0)


def _expert(suffix: str, ours: str, gemma: GemmaConfig, *, adaptive: bool) -> Iterator[Entry]:
    llm, depth = "PaliGemma/llm/layers", gemma.depth
    heads, kv, two = (("q", gemma.num_heads),), (("t", 2), ("k", gemma.num_kv_heads)), (("t", 2),)
    attn, mlp = f"{llm}/attn", f"{llm}/mlp{suffix}"
    yield Entry(f"{attn}/q_einsum{suffix}/w", f"{ours}.q.weight", "q x e -> (q e) x", heads, depth)
    yield Entry(f"{attn}/kv_einsum{suffix}/w", f"{ours}.kv.weight", "t k x e -> (t k e) x", kv, depth)
    yield Entry(f"{attn}/attn_vec_einsum{suffix}/w", f"{ours}.o.weight", "q e x -> x (q e)", heads, depth)
    yield Entry(f"{mlp}/gating_einsum", f"{ours}.gate_up.weight", "t x f -> (t f) x", two, depth)
    yield Entry(f"{mlp}/linear", f"{ours}.down.weight", TRANSPOSE, layers=depth)
    yield from _norm(f"{llm}/pre_attention_norm{suffix}", f"{ours}.attn_norm", adaptive=adaptive, layers=depth)
    yield from _norm(f"{llm}/pre_ffw_norm{suffix}", f"{ours}.mlp_norm", adaptive=adaptive, layers=depth)
    for factor in "ab":
        if gemma.lora_attn is not None:
            yield Entry(f"{attn}/q_einsum{suffix}/lora_{factor}", f"{ours}.q.lora.{factor}", layers=depth)
            yield Entry(
                f"{attn}/kv_einsum{suffix}/lora_{factor}", f"{ours}.kv.lora.{factor}", "t k i o -> (t k) i o", kv, depth
            )
            yield Entry(f"{attn}/attn_vec_einsum{suffix}/lora_{factor}", f"{ours}.o.lora.{factor}", layers=depth)
        if gemma.lora_ffn is not None:
            yield Entry(f"{mlp}/gating_einsum_lora_{factor}", f"{ours}.gate_up.lora.{factor}", layers=depth)
            yield Entry(f"{mlp}/linear_lora_{factor}", f"{ours}.down.lora.{factor}", "i o -> 1 i o", layers=depth)


def _fused(config: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """(fused, query, key and value) names: openpi stacks the three where every query head has a key of its own."""
    for suffix, gemma in (("", config.paligemma), ("_1", config.action_expert)):
        if gemma.num_heads == gemma.num_kv_heads:
            for part in ("w",) if gemma.lora_attn is None else ("w", "lora_a", "lora_b"):
                fused, q, kv = (f"PaliGemma/llm/layers/attn/{n}_einsum{suffix}/{part}" for n in ("qkv", "q", "kv"))
                yield fused, q, kv


def from_openpi_jax(config: ModelConfig, arrays: Mapping[str, np.ndarray | Tensor]) -> dict[str, Tensor]:
    """Our state dict from JAX arrays by path ("PaliGemma/img/…"). What does not fit is named, all at once."""
    from piston.model.pi0 import Pi0

    table = {e.jax: e for e in entries(config)}
    expected = {k: tuple(v.shape) for k, v in to_openpi_jax(config, Pi0.on_meta(config).state_dict()).items()}
    problems = [f"missing {k} {expected[k]}" for k in expected if k not in arrays]
    problems += [f"unexpected {k} {tuple(v.shape)}" for k, v in arrays.items() if k not in expected]
    problems += [
        f"shape of {k} is {tuple(v.shape)}, the model has {expected[k]}"
        for k, v in arrays.items()
        if k in expected and tuple(v.shape) != expected[k]
    ]
    if problems:
        raise ValueError(
            f"{len(problems)} parameters do not fit the model; expected exactly the {len(expected)} arrays of this "
            "configuration; check the model sizes, π0 against π0.5, and LoRA:\n  " + "\n  ".join(problems)
        )
    tensors = {path: torch.as_tensor(array) for path, array in arrays.items()}
    for fused, q, kv in _fused(config):
        stacked = tensors.pop(fused)
        tensors[q], tensors[kv] = stacked[:, 0], stacked[:, 1:]
    state: dict[str, Tensor] = {}
    for path, tensor in tensors.items():
        state.update(table[path].to_ours(tensor))
    return state


def to_openpi_jax(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """JAX arrays by path from our state dict, or from anything keyed and shaped like it (gradients, EMA)."""
    arrays = {e.jax: e.to_jax(state) for e in entries(config)}
    for fused, q, kv in _fused(config):
        arrays[fused] = torch.cat((arrays.pop(q)[:, None], arrays.pop(kv)), dim=1)
    return arrays
