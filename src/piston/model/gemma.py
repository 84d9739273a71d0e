"""The joint transformer: two experts, each with its own weights, attending together. One Block owns one layer of both.

Source: openpi models/gemma.py, models/lora.py
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int32
from torch import Tensor, nn

from piston.config.schema import GemmaConfig
from piston.model.attention import attend, never_empty, rope_angles, rotate
from piston.model.layers import Projection, gelu, rounded, spread, wide
from piston.model.lora import FanIn, FanOut

RMS_NORM_EPS = 1e-6


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer, [B, N, K, E] in the compute dtype."""

    k: Tensor
    v: Tensor


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + scale); no gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x_BNX: Tensor, cond_BY: Tensor | None = None) -> tuple[Tensor, None]:
        return (_unit_rms(x_BNX) * (1 + self.scale)).to(x_BNX.dtype), None


class AdaRMSNorm(nn.Module):
    """x / rms(x) · (1 + scale) + shift, with scale, shift and residual gate made from the condition (π0.5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = Projection(width, 3 * width, bias=True)

    def forward(self, x_BNY: Tensor, cond_BY: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert cond_BY is not None, "adaRMS needs the time condition"
        scale, shift, gate = self.modulation(cond_BY.to(x_BNY.dtype))[:, None, :].chunk(3, dim=-1)
        return (_unit_rms(x_BNY) * (1 + scale) + shift).to(x_BNY.dtype), gate


def _unit_rms(x: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + eps), float32.

    Two casts, in this order: in bfloat16 each rounds its own part of x's gradient, and autograd then adds them to the
    residual's in the order of the reference, the later cast's first.
    """
    scaled, x32 = wide(x), wide(x)
    return scaled * torch.reciprocal(torch.sqrt((x32 * x32).mean(-1, keepdim=True) + RMS_NORM_EPS))


def gated_residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    """x + y, or x + y·gate where the norm gave a gate."""
    return x + y if gate is None else x + y * spread(gate, y.shape[1])


class Expert(nn.Module):
    """One expert's weights of one layer."""

    def __init__(self, config: GemmaConfig, *, adaptive: bool) -> None:
        super().__init__()
        width, heads, kv_heads, head_dim = config.width, config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim
        attn, ffn = config.lora_attn, config.lora_ffn
        norm = AdaRMSNorm if adaptive else RMSNorm
        self.attn_norm = norm(width)
        self.q = Projection(
            width, heads * head_dim, bias=False,
            adapter=None if attn is None else FanOut(attn, heads, width, head_dim, attn.scaling),
        )  # fmt: skip
        self.kv = Projection(
            width, 2 * kv_heads * head_dim, bias=False,
            adapter=None if attn is None else FanOut(attn, 2 * kv_heads, width, head_dim, attn.scaling),
        )  # fmt: skip
        self.o = Projection(
            heads * head_dim, width, bias=False,
            adapter=None if attn is None else FanIn(attn, heads, head_dim, width, attn.scaling),
        )  # fmt: skip
        self.mlp_norm = norm(width)
        # The reference does not scale the FFN adapters: openpi models/lora.py, FeedForward.
        self.gate_up = Projection(
            width, 2 * config.mlp_dim, bias=False,
            adapter=None if ffn is None else FanOut(ffn, 2, width, config.mlp_dim, 1.0),
        )  # fmt: skip
        self.down = Projection(
            config.mlp_dim, width, bias=False,
            adapter=None if ffn is None else FanIn(ffn, 1, config.mlp_dim, width, 1.0),
        )  # fmt: skip

    def queries(self, y_BNX: Tensor) -> Tensor:
        return rearrange(self.q(y_BNX), "b n (q e) -> b n q e", q=self.num_heads)

    def keys_values(self, y_BNX: Tensor) -> KeyValue:
        k, v = rearrange(self.kv(y_BNX), "b n (two k e) -> two b n k e", two=2, k=self.num_kv_heads)
        return KeyValue(k, v)

    def mlp(self, y_BNX: Tensor) -> Tensor:
        gate, up = self.gate_up.halves(y_BNX)
        return self.down(gelu(gate) * up)

    def finish(self, x: Tensor, attended_BNQE: Tensor, gate: Tensor | None, cond_BY: Tensor | None) -> Tensor:
        """Attention output, residual, FFN, residual."""
        x = gated_residual(x, self.o(attended_BNQE.flatten(-2)), gate)
        y, gate = self.mlp_norm(x, cond_BY)
        return gated_residual(x, self.mlp(y), gate)


class Rotary(NamedTuple):
    """cos and sin of the rotary angles of the tokens at hand, [B, N, 1, E/2] float32."""

    cos: Tensor
    sin: Tensor


class Block(nn.Module):
    """One layer: pre-norm joint attention of prefix and suffix tokens, then each expert's own FFN.

    The unit of sharding, compilation, checkpointing, LoRA and comparison.
    """

    def __init__(self, vlm: GemmaConfig, expert: GemmaConfig, *, adaptive: bool) -> None:
        super().__init__()
        self.prefix = Expert(vlm, adaptive=False)
        self.suffix = Expert(expert, adaptive=adaptive)

    def forward(
        self,
        prefix_BTX: Tensor | None,
        suffix_BSY: Tensor | None,
        rotary: Rotary,
        mask_BNM: Bool[Tensor, "B N M"],
        cond_BY: Tensor | None,
        cache: KeyValue | None = None,
        prefix_output: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, KeyValue]:
        """New prefix, new suffix, and the keys and values of this call's tokens (prefix first).

        With `prefix_output=False` prefix tokens only give keys and values and no new prefix is computed: exact in the
        last layer, where nothing reads it. `mask_BNM` has a row per token of this call (of the suffix alone with
        `prefix_output=False`) and a column per cached and new token.
        """
        parts: list[tuple[Expert, Tensor, Tensor, Tensor | None]] = []
        if prefix_BTX is not None:
            parts.append((self.prefix, prefix_BTX, *self.prefix.attn_norm(prefix_BTX)))
        if suffix_BSY is not None:
            parts.append((self.suffix, suffix_BSY, *self.suffix.attn_norm(suffix_BSY, cond_BY)))
        k, v = (torch.cat(rows, dim=1) for rows in zip(*(e.keys_values(y) for e, _, y, _ in parts), strict=True))
        new = KeyValue(rotate(k, *rotary), v)
        keys, values = new if cache is None else (torch.cat(pair, dim=1) for pair in zip(cache, new, strict=True))

        asking = parts if prefix_output or prefix_BTX is None else parts[1:]
        if not asking:
            return None, None, new
        q_BNQE = torch.cat([e.queries(y) for e, _, y, _ in asking], dim=1)
        rows = q_BNQE.shape[1]
        scale = rounded(self.suffix.head_dim**-0.5, q_BNQE.dtype)  # exact only where head_dim is a power of four
        q_BNQE = rotate(q_BNQE, rotary.cos[:, -rows:], rotary.sin[:, -rows:]) * scale
        attended = attend(q_BNQE, keys, values, mask_BNM)
        outputs: dict[int, Tensor] = {}
        start = 0
        for expert, x, _, gate in asking:
            part = attended[:, start : start + x.shape[1]]
            outputs[id(expert)] = expert.finish(x, part, gate, cond_BY)
            start += x.shape[1]
        return outputs.get(id(self.prefix)), outputs.get(id(self.suffix)), new


class Gemma(nn.Module):
    """Token embedding, the stack of blocks and the two final norms."""

    def __init__(
        self, vlm: GemmaConfig, expert: GemmaConfig, vocab_size: int, *, adaptive: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.head_dim = vlm.head_dim
        self.embedding = nn.Parameter(torch.empty(vocab_size, vlm.width))
        self.blocks = nn.ModuleList(Block(vlm, expert, adaptive=adaptive) for _ in range(vlm.depth))
        self.prefix_norm = RMSNorm(vlm.width)
        self.suffix_norm = AdaRMSNorm(expert.width) if adaptive else RMSNorm(expert.width)

    def embed(self, tokens_BL: Int32[Tensor, "B L"]) -> Float[Tensor, "B L X"]:
        """Rows of the table times √width (rounded to the table's dtype first), in the compute dtype."""
        scale = rounded(self.embedding.shape[1] ** 0.5, self.embedding.dtype)
        return (F.embedding(tokens_BL, self.embedding) * scale).to(self.dtype)

    def forward(
        self,
        prefix_BTX: Tensor | None,
        suffix_BSY: Tensor | None,
        positions_BN: Int32[Tensor, "B N"],
        mask_BNM: Bool[Tensor, "B N M"],
        cond_BY: Tensor | None,
        cache: list[KeyValue] | None = None,
        prefix_output: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, list[KeyValue]]:
        """Final prefix (only with `prefix_output`), final suffix, and every layer's keys and values."""
        prefix = None if prefix_BTX is None else prefix_BTX.to(self.dtype)
        suffix = None if suffix_BSY is None else suffix_BSY.to(self.dtype)
        rotary = Rotary(*rope_angles(positions_BN, self.head_dim))
        mask = never_empty(mask_BNM)
        suffix_rows = 0 if suffix is None else suffix.shape[1]
        key_values: list[KeyValue] = []
        for i, block in enumerate(self.blocks):
            needed = prefix_output or i + 1 < len(self.blocks)
            rows = mask if needed else mask[:, mask.shape[1] - suffix_rows :]
            prefix, suffix, kv = block(
                prefix, suffix, rotary, rows, cond_BY, None if cache is None else cache[i], prefix_output=needed
            )
            key_values.append(kv)
        if prefix is not None:
            prefix, _ = self.prefix_norm(prefix)
        if suffix is not None:
            suffix, _ = self.suffix_norm(suffix, cond_BY)
        return prefix, suffix, key_values
