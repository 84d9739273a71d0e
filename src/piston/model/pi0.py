"""π0 and π0.5: observation, noisy action chunk and flow time → velocity; and actions by Euler integration.

Source: openpi models/pi0.py Taps carry the names of the golden bundles.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from piston.batch import Observation
from piston.config.schema import ModelConfig
from piston.model.attention import attention_mask, positions_of
from piston.model.gemma import Gemma, KeyValue
from piston.model.init import initialise
from piston.model.layers import Projection, wide
from piston.model.siglip import Siglip

TIME_MIN_PERIOD = 4e-3
TIME_MAX_PERIOD = 4.0

Tap = dict[str, Tensor] | None


class Tokens(NamedTuple):
    """A run of tokens with its validity and autoregressive flags; `cond_BY` is π0.5's adaRMS condition."""

    tokens: Tensor
    valid_BN: Tensor
    starts_block_N: Tensor
    cond_BY: Tensor | None = None


@functools.lru_cache(maxsize=32)
def _time_frequencies(width: int, device: torch.device) -> Tensor:
    """1/period, float32 [width/2], in the reference's own order of float32 roundings.

    The power is correctly rounded (float64, then cast): numpy's and torch's float32 powers are an ulp off in places,
    which moves the embedding by 6e-5, since the angle reaches 1571 rad.
    """
    half = width // 2
    fraction = np.arange(half, dtype=np.float32) * np.float32(1.0 / max(half - 1, 1))
    fraction[-1] = 1.0 if half > 1 else 0.0
    ratio = np.power(TIME_MAX_PERIOD / TIME_MIN_PERIOD, fraction.astype(np.float64)).astype(np.float32)
    period = np.float32(TIME_MIN_PERIOD) * ratio
    return torch.from_numpy(np.float32(1.0) / period).to(device)


def time_embedding(time_B: Float[Tensor, "B"], width: int, *, alone: bool = False) -> Float[Tensor, "B {width}"]:
    """[sin, cos] of the flow time at periods from 4 ms to 4 s, float32; openpi models/pi0.py (posemb_sincos).

    `alone`: the loss of a whole batch of one sample, for which XLA multiplies time by 2π before it divides by the
    period. The angle reaches 1571 rad, so this one rounding moves the embedding by 1.2e-4.
    """
    rate, turn = _time_frequencies(width, time_B.device), 2 * math.pi
    t_B1 = time_B[:, None].float()
    angle = (t_B1 * turn) * rate if alone else t_B1 * (rate * turn)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


class Pi0(nn.Module):
    """The whole network on one device. Parameters are float32; `config.dtype` is the transformers' compute dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dtype = getattr(torch, config.dtype)
        vlm, expert = config.paligemma, config.action_expert
        self.siglip = Siglip(config.siglip, config.patches, vlm.width, dtype)
        self.gemma = Gemma(vlm, expert, config.vocab_size, adaptive=config.pi05, dtype=dtype)
        width = expert.width
        self.action_in_proj = Projection(config.action_dim, width, bias=True)
        self.action_out_proj = Projection(width, config.action_dim, bias=True)
        if config.pi05:
            self.time_mlp_in = Projection(width, width, bias=True)
            self.time_mlp_out = Projection(width, width, bias=True)
        else:
            self.state_proj = Projection(config.action_dim, width, bias=True)
            self.action_time_mlp_in = Projection(2 * width, width, bias=True)
            self.action_time_mlp_out = Projection(width, width, bias=True)

    @classmethod
    def on_meta(cls, config: ModelConfig) -> "Pi0":
        """The model without memory: names, shapes and counts only."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def build(cls, config: ModelConfig, *, device: torch.device | str, seed: int) -> "Pi0":
        """The model with the reference's initialisers, each parameter drawn from (seed, its name)."""
        model = cls.on_meta(config).to_empty(device=device)
        initialise(model, seed)
        return model

    def embed_prefix(self, observation: Observation, tap: Tap = None) -> Tokens:
        """Image tokens of every camera, then prompt tokens; bidirectional."""
        batch, cameras = observation.images.shape[:2]
        siglip_tap: Tap = None if tap is None else {}
        image_tokens = self.siglip(observation.images.flatten(0, 1), siglip_tap)
        image_tokens = rearrange(image_tokens, "(b c) p x -> b c p x", c=cameras)
        image_valid = observation.image_masks[:, :, None].expand(batch, cameras, image_tokens.shape[2]).flatten(1)
        tokens = torch.cat((image_tokens.flatten(1, 2), self.gemma.embed(observation.tokenized_prompt)), dim=1)
        valid = torch.cat((image_valid, observation.tokenized_prompt_mask), dim=1)
        starts = torch.zeros(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        if tap is not None:
            assert siglip_tap is not None
            # The bundles hold the tower's inner rows for the first camera.
            tap.update({k: rearrange(v, "(b c) p v -> b c p v", c=cameras)[:, 0] for k, v in siglip_tap.items()})
            tap.update({f"image_tokens/{name}": image_tokens[:, i] for i, name in enumerate(self.config.cameras)})
            tap.update({"prefix_tokens": tokens, "prefix_mask": valid, "prefix_ar_mask": starts})
        return Tokens(tokens, valid, starts)

    def embed_suffix(
        self, observation: Observation, x_t: Tensor, time_B: Tensor, tap: Tap = None, time_posemb: Tensor | None = None
    ) -> Tokens:
        """State token (π0) and action tokens, float32; π0.5 also gives the adaRMS condition.

        `time_posemb` [B, Y] replaces the time embedding: a bundle's own, to test what comes after it on its own.
        """
        width = self.config.action_expert.width
        temb_BY = time_embedding(time_B, width) if time_posemb is None else time_posemb
        action_BAY = self.action_in_proj(x_t)
        cond_BY = None
        if self.config.pi05:
            cond_BY = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(temb_BY))))
            tokens = action_BAY
        else:
            pair = torch.cat((action_BAY, temb_BY[:, None].expand_as(action_BAY)), dim=-1)
            action_BAY = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(pair)))
            tokens = torch.cat((self.state_proj(observation.state)[:, None], action_BAY), dim=1)
        valid = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        starts = index == 0 if self.config.pi05 else index <= 1
        if tap is not None:
            tap.update(
                {"time_posemb": temb_BY, "suffix_tokens": tokens, "suffix_mask": valid, "suffix_ar_mask": starts}
            )
            if cond_BY is not None:
                tap["adarms_cond"] = cond_BY
        return Tokens(tokens, valid, starts, cond_BY)

    def forward(
        self,
        observation: Observation,
        x_t: Float[Tensor, "B A D"],
        time_B: Float[Tensor, "B"],
        tap: Tap = None,
        time_posemb: Tensor | None = None,
    ) -> Float[Tensor, "B A D"]:
        """Velocity at (x_t, t), float32: one joint pass over prefix and suffix."""
        prefix = self.embed_prefix(observation, tap)
        suffix = self.embed_suffix(observation, x_t, time_B, tap, time_posemb)
        valid = torch.cat((prefix.valid_BN, suffix.valid_BN), dim=1)
        mask = attention_mask(valid, torch.cat((prefix.starts_block_N, suffix.starts_block_N)))
        positions = positions_of(valid)
        prefix_out, suffix_out, key_values = self.gemma(
            prefix.tokens, suffix.tokens, positions, mask, suffix.cond_BY, prefix_output=tap is not None
        )
        velocity = self._velocity(suffix_out)
        if tap is not None:
            tap.update({"attn_mask": mask, "positions": positions, "prefix_out": prefix_out, "suffix_out": suffix_out})
            tap.update(
                {"kv_k": torch.stack([kv.k for kv in key_values]), "kv_v": torch.stack([kv.v for kv in key_values])}
            )
            tap["v_t"] = velocity
        return velocity

    def _velocity(self, suffix_out: Tensor) -> Tensor:
        return self.action_out_proj(wide(suffix_out[:, -self.config.action_horizon :]))

    @torch.no_grad()
    def sample_actions(
        self, observation: Observation, noise: Float[Tensor, "B A D"], num_steps: int = 10, tap: Tap = None
    ) -> Float[Tensor, "B A D"]:
        """Action chunk [B, A, D], normalised: Euler from noise at t = 1 to t = 0; the prefix is computed once."""
        if num_steps < 1:
            raise ValueError(
                f"num_steps is {num_steps}; sampling needs at least one Euler step (the reference takes 10)"
            )
        prefix = self.embed_prefix(observation)
        prefix_mask = attention_mask(prefix.valid_BN, prefix.starts_block_N)
        positions = positions_of(prefix.valid_BN)
        _, _, cache = self.gemma(prefix.tokens, None, positions, prefix_mask, None)
        if tap is not None:
            tap["sample/prefix_k"] = torch.stack([kv.k for kv in cache])
            tap["sample/prefix_v"] = torch.stack([kv.v for kv in cache])
            tap["sample/prefix_positions"] = positions
        dt = np.float32(-1.0 / num_steps)
        time = np.float32(1.0)
        x_t = noise
        steps: list[tuple[np.float32, Tensor, Tensor]] = []
        while time >= -dt / 2:  # exactly num_steps times
            time_B = torch.full((noise.shape[0],), float(time), device=noise.device)
            velocity = self._suffix_step(observation, x_t, time_B, prefix, cache, tap)
            x_t = x_t + float(dt) * velocity
            steps.append((time, x_t, velocity))
            time = np.float32(time + dt)
        if tap is not None:
            tap["sample/times"] = torch.tensor([float(t) for t, _, _ in steps])
            tap["sample/x_steps"] = torch.stack([x for _, x, _ in steps])
            tap["sample/v_steps"] = torch.stack([v for _, _, v in steps])
            tap["sample/actions"] = x_t
        return x_t

    def _suffix_step(
        self, observation: Observation, x_t: Tensor, time_B: Tensor, prefix: Tokens, cache: list[KeyValue], tap: Tap
    ) -> Tensor:
        suffix = self.embed_suffix(observation, x_t, time_B)
        rows = suffix.valid_BN.shape[1]
        to_prefix = prefix.valid_BN[:, None].expand(-1, rows, -1)
        mask = torch.cat((to_prefix, attention_mask(suffix.valid_BN, suffix.starts_block_N)), dim=2)
        positions = (prefix.valid_BN.sum(1, keepdim=True) + positions_of(suffix.valid_BN)).to(torch.int32)
        _, suffix_out, _ = self.gemma(None, suffix.tokens, positions, mask, suffix.cond_BY, cache)
        if tap is not None:
            tap["sample/suffix_positions"] = positions
            tap["sample/suffix_attn_mask"] = mask
        return self._velocity(suffix_out)

    def blocks(self) -> list[nn.Module]:
        """The repeated units in the order of the forward pass: vision blocks, then joint blocks."""
        return [*self.siglip.blocks, *self.gemma.blocks]
