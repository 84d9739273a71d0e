"""The vision tower: images [-1, 1] → one row of tokens per camera, already at the VLM's width.

Source: openpi models/siglip.py Patch product and position embedding are float32, the
blocks run in the compute dtype, LayerNorm statistics are float32.
"""

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from piston.config.schema import SiglipConfig
from piston.model.layers import Projection, gelu, rounded, unmasked_attention, wide

LAYER_NORM_EPS = 1e-6


class LayerNorm(nn.Module):
    """flax's LayerNorm: float32 statistics with var = E[x²] − E[x]² (clipped at 0), result in x's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        centred, x32 = wide(x), wide(x)  # two casts in this order: see gemma._unit_rms
        mean = x32.mean(-1, keepdim=True)
        variance = ((x32 * x32).mean(-1, keepdim=True) - mean * mean).clamp_min(0.0)
        return ((centred - mean) * (torch.rsqrt(variance + LAYER_NORM_EPS) * self.weight) + self.bias).to(x.dtype)


class SiglipBlock(nn.Module):
    """Pre-norm self-attention and MLP; residual stream in the compute dtype."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        width = config.width
        self.norm_attn = LayerNorm(width)
        self.q = Projection(width, width, bias=True)
        self.k = Projection(width, width, bias=True)
        self.v = Projection(width, width, bias=True)
        self.out = Projection(width, width, bias=True)
        self.norm_mlp = LayerNorm(width)
        self.fc1 = Projection(width, config.mlp_dim, bias=True)
        self.fc2 = Projection(config.mlp_dim, width, bias=True)

    def forward(self, x_BPV: Float[Tensor, "B P V"]) -> Float[Tensor, "B P V"]:
        x_BPV = x_BPV + self._attention(self.norm_attn(x_BPV))
        return x_BPV + self.fc2(gelu(self.fc1(self.norm_mlp(x_BPV))))

    def _attention(self, y_BPV: Tensor) -> Tensor:
        # In this order: autograd adds the gradients of y from the last to the first, (q + k) + v as the reference.
        v, k, q = (rearrange(p(y_BPV), "b p (q e) -> b p q e", q=self.num_heads) for p in (self.v, self.k, self.q))
        divisor = rounded(math.sqrt(q.shape[-1]), q.dtype)  # flax divides q, by a divisor in the compute dtype
        return self.out(unmasked_attention(q / divisor, k, v).flatten(-2))


class Siglip(nn.Module):
    """Patch embedding, position embedding, blocks, final norm and the projection to the VLM's width."""

    def __init__(self, config: SiglipConfig, patches: int, vlm_width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.dtype = dtype
        self.patch_embed = Projection(config.patch_size[0] * config.patch_size[1] * 3, config.width, bias=True)
        self.pos_embedding = nn.Parameter(torch.empty(patches, config.width))
        self.blocks = nn.ModuleList(SiglipBlock(config) for _ in range(config.depth))
        self.norm = LayerNorm(config.width)
        self.head = Projection(config.width, vlm_width, bias=True)

    def forward(
        self, images_BHW3: Float[Tensor, "B H W 3"], tap: dict[str, Tensor] | None = None
    ) -> Float[Tensor, "B P X"]:
        """Image tokens, not scaled and not pooled. `tap` collects the intermediate rows."""
        height, width = self.patch_size
        patches = rearrange(wide(images_BHW3), "b (h y) (w x) c -> b (h w) (y x c)", y=height, x=width)
        stem_BPV = self.patch_embed(patches)
        embedded_BPV = stem_BPV + self.pos_embedding
        x_BPV = embedded_BPV.to(self.dtype)
        for i, block in enumerate(self.blocks):
            x_BPV = block(x_BPV)
            if tap is not None:
                tap[f"siglip/block{i:02d}_out"] = x_BPV
        x_BPV = self.norm(x_BPV)
        if tap is not None:
            tap.update({"siglip/stem": stem_BPV, "siglip/with_posemb": embedded_BPV, "siglip/encoded": x_BPV})
        return self.head(x_BPV)
