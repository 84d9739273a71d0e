"""Attention as the reference computes it: which token sees which, rotary positions, grouped heads, float32 logits.

Source: openpi models/pi0.py (make_attn_mask), models/gemma.py (Attention, _apply_rope).
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from piston.model.layers import wide

ROPE_MAX_WAVELENGTH = 10_000.0


def attention_mask(valid_BN: Bool[Tensor, "B N"], starts_block_N: Bool[Tensor, "N"]) -> Bool[Tensor, "B N N"]:
    """Who may see whom: query i sees key j iff block(j) ≤ block(i) and both are valid.

    `starts_block_N` is True where a token opens a new autoregressive block; a block is bidirectional inside.
    """
    block_N = starts_block_N.cumsum(0)
    causal_NN = block_N[None, :] <= block_N[:, None]
    return causal_NN[None] & valid_BN[:, None, :] & valid_BN[:, :, None]


def positions_of(valid_BN: Bool[Tensor, "B N"]) -> Int32[Tensor, "B N"]:
    """Rotary position of each token: invalid tokens repeat the one before (−1 at the start)."""
    return (valid_BN.cumsum(1) - 1).to(torch.int32)


def never_empty(mask_BNM: Bool[Tensor, "B N M"]) -> Bool[Tensor, "B N M"]:
    """The same mask, but rows that see nothing see everything.

    Such rows belong to padding; the reference gives them finite values that no valid token reads, a fused softmax would
    give NaN, and NaN·0 would spread.
    """
    return mask_BNM | ~mask_BNM.any(-1, keepdim=True)


@functools.lru_cache(maxsize=32)
def _rope_timescale(head_dim: int, device: torch.device) -> Tensor:
    """10000^(2j/E), float32; the power correctly rounded, as XLA's is (numpy's float32 power can be an ulp off)."""
    exponent = (np.float32(2.0) / np.float32(head_dim)) * np.arange(head_dim // 2, dtype=np.float32)
    return torch.from_numpy(np.power(ROPE_MAX_WAVELENGTH, exponent.astype(np.float64)).astype(np.float32)).to(device)


def rope_angles(positions_BN: Int32[Tensor, "B N"], head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, float32 [B, N, 1, head_dim/2]; the same for every layer of a forward pass."""
    angle = positions_BN[..., None].float() / _rope_timescale(head_dim, positions_BN.device)
    return angle.cos()[:, :, None], angle.sin()[:, :, None]


def rotate(x_BNQE: Float[Tensor, "B N Q E"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B N Q E"]:
    """Rotary embedding on the two halves of each head, in float32, back in x's dtype."""
    first, second = x_BNQE.chunk(2, dim=-1)
    turned = (wide(first) * cos - wide(second) * sin, wide(second) * cos + wide(first) * sin)
    return torch.cat(turned, dim=-1).to(x_BNQE.dtype)


def attend(
    q_BNQE: Float[Tensor, "B N Q E"],
    k_BMKE: Float[Tensor, "B M K E"],
    v_BMKE: Float[Tensor, "B M K E"],
    mask_BNM: Bool[Tensor, "B N M"],
) -> Float[Tensor, "B N Q E"]:
    """softmax(q·kᵀ)·v with queries scaled already; logits and softmax in float32; kv heads are the slow index of Q.

    No row of the mask may be empty (see `never_empty`). In bfloat16 the reference rounds the probabilities before it
    multiplies by v. A fused kernel rounds elsewhere; on a GPU it is used all the same, since the spelled-out form keeps
    float32 logits of every layer for the backward pass.
    """
    if q_BNQE.dtype == torch.bfloat16 and not q_BNQE.is_cuda:
        return _attend_rounded(q_BNQE, k_BMKE, v_BMKE, mask_BNM)
    out_BQNE = F.scaled_dot_product_attention(
        q_BNQE.transpose(1, 2),
        k_BMKE.transpose(1, 2),
        v_BMKE.transpose(1, 2),
        attn_mask=mask_BNM[:, None],
        scale=1.0,
        enable_gqa=q_BNQE.shape[2] != k_BMKE.shape[2],
    )
    return out_BQNE.transpose(1, 2)


def _attend_rounded(q_BNQE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor, mask_BNM: Tensor) -> Tensor:
    """`attend` rounded where openpi models/gemma.py (Attention) rounds: float32 logits, probabilities in q's dtype.

    The query heads that share a key stand in one axis, so that the gradient of key and value is one product, too.
    """
    groups = q_BNQE.shape[2] // k_BMKE.shape[2]
    q = rearrange(q_BNQE, "b n (k g) e -> b k (g n) e", g=groups)
    k, v = rearrange(k_BMKE, "b m k e -> b k e m"), rearrange(v_BMKE, "b m k e -> b k m e")
    hidden = ~mask_BNM[:, None].repeat(1, 1, groups, 1)
    probabilities = (q.float() @ k.float()).masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
    return rearrange(probabilities @ v, "b k (g n) e -> b n (k g) e", g=groups)
