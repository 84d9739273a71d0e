"""Does verification notice? Puts one known porting mistake after another into Piston and verifies a bundle with each.

    python scripts/mutation_check.py [BUNDLE]      (tests/golden by default)

Prints what each mistake moved first, and caught/total; exit code 1 if one went unnoticed. A mistake is a patch of one
name while the verifier runs; no file is changed. The list is the catalogue of ways in which ports of openpi differ.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import piston.data.augment as augment
import piston.model.attention as attention
import piston.model.flow as flow
import piston.model.gemma as gemma
import piston.model.layers as layers
import piston.model.lora as lora
import piston.model.pi0 as pi0
import piston.model.siglip as siglip
import piston.train.optim as optim
import piston.verify.curve as curve
import piston.verify.execute as execute
import piston.verify.forward as forward
import piston.verify.gradient as gradient
import piston.verify.preprocess as preprocess
import piston.verify.units as units
from piston.data.stats import RunningStats
from piston.verify.bundle import Bundle, ModelSet, open_bundle
from piston.verify.report import Row

Patch = tuple[object, str, Any]
TIES = 0.1  # share of bfloat16 entries that may round the other way, where a float32 sum ends near a tie


@dataclass(frozen=True)
class Mistake:
    """A name, the layers that should see it, and the patches that make it."""

    name: str
    where: str  # forward, bits, gradient, units, preprocess or curve
    patches: tuple[Patch, ...]
    pi05: bool | None = None  # which sets have the mutated part; None: any
    lora: bool = False
    grouped: bool = False  # needs several key heads, and fewer than query heads
    rooted: bool = False  # needs a VLM width whose root is not exact in bfloat16


def erf_gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotate_in_compute_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def float64_frequencies(width: int, device: torch.device) -> Tensor:
    return torch.from_numpy((1 / (0.004 * 1000.0 ** np.linspace(0, 1, width // 2))).astype(np.float32)).to(device)


def geometric_frequencies(width: int, device: torch.device) -> Tensor:
    half = width // 2  # a linspace that leaves its end out
    return torch.from_numpy((1 / (0.004 * 1000.0 ** (np.arange(half) / half))).astype(np.float32)).to(device)


def all_bidirectional(valid: Tensor, starts: Tensor) -> Tensor:
    return valid[:, None, :] & valid[:, :, None]


def padding_ignored(valid: Tensor, starts: Tensor) -> Tensor:
    return attention_mask(torch.ones_like(valid), starts)


def actions_causal(valid: Tensor, starts: Tensor) -> Tensor:
    late = starts.cumsum(0) > 0
    return attention_mask(valid, starts | late)


def counting_padding(valid: Tensor) -> Tensor:
    return torch.arange(valid.shape[1], dtype=torch.int32, device=valid.device).expand(valid.shape)


def softmax_in_compute_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    logits = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    return (logits.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask[:, None], scale=1.0, enable_gqa=True).transpose(1, 2)


def tower_softmax_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return ((q @ k.transpose(-1, -2)).float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def two_pass_layer_norm(self: siglip.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, siglip.LAYER_NORM_EPS).to(x.dtype)


def gain_without_one(self: gemma.RMSNorm, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, None]:
    return (gemma._unit_rms(x) * self.scale).to(x.dtype), None


def modulation_in_float32(self: gemma.AdaRMSNorm, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
    scale, shift, gate = self.modulation(cond.float())[:, None, :].chunk(3, dim=-1)
    return (gemma._unit_rms(x) * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def time_in_bfloat16(time: Tensor, width: int, *, alone: bool = False) -> Tensor:
    return time_embedding(time.bfloat16().float(), width, alone=alone)


def embedding_rounded_twice(self: gemma.Gemma, tokens: Tensor) -> Tensor:
    scale = torch.tensor(self.embedding.shape[1] ** 0.5, dtype=self.dtype)
    return F.embedding(tokens, self.embedding).to(self.dtype) * scale


def noise_in_bfloat16(
    model: pi0.Pi0, observation: Any, actions: Tensor, noise: Tensor, time: Tensor, tap: Any, posemb: Any
) -> Tensor:
    return flow_loss(model, observation, actions, noise.bfloat16().float(), time, tap, posemb)


def gelu_in_float32(x: Tensor) -> Tensor:
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def heads_interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Key heads as the fast index: query head h reads key head h mod K."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat(1, 1, groups, 1) for t in (k, v))
    return attend(q, k, v, mask)


def ada_norm(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Any]:
    def forward(self: gemma.AdaRMSNorm, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert cond is not None
        parts = self.modulation(cond.to(x.dtype))[:, None, :].chunk(3, dim=-1)
        scale, shift, gate = change(*parts)
        return (gemma._unit_rms(x) * (1 + scale) + shift).to(x.dtype), gate

    return forward


def norm_without_gradient(x: Tensor) -> Tensor:
    x32 = layers.wide(x)
    return x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + gemma.RMS_NORM_EPS).detach()


def unscaled_embedding(self: gemma.Gemma, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, self.embedding).to(self.dtype)


def with_prefix(change: Callable[..., Any]) -> Callable[..., Any]:
    original = pi0.Pi0.embed_prefix

    def embed_prefix(self: pi0.Pi0, observation: Any, tap: Any = None) -> Any:
        return change(original, self, observation, tap)

    return embed_prefix


def rotated_cameras(original: Callable[..., Any], self: pi0.Pi0, observation: Any, tap: Any) -> Any:
    images, masks = observation.images.roll(1, 1), observation.image_masks.roll(1, 1)
    return original(self, dataclasses.replace(observation, images=images, image_masks=masks), tap)


def reversed_channels(original: Callable[..., Any], self: pi0.Pi0, observation: Any, tap: Any) -> Any:
    return original(self, dataclasses.replace(observation, images=observation.images.flip(-1)), tap)


def masked_camera_seen(original: Callable[..., Any], self: pi0.Pi0, observation: Any, tap: Any) -> Any:
    masks = torch.ones_like(observation.image_masks)
    return original(self, dataclasses.replace(observation, image_masks=masks), tap)


def tower(change: Callable[[siglip.Siglip, Tensor], Tensor]) -> Callable[..., Any]:
    original = siglip.Siglip.forward

    def forward(self: siglip.Siglip, images: Tensor, tap: Any = None) -> Tensor:
        return change(self, original(self, images, tap))

    return forward


def column_major_positions(self: siglip.Siglip, images: Tensor, tap: Any = None) -> Tensor:
    rows, columns = images.shape[1] // self.patch_size[0], images.shape[2] // self.patch_size[1]
    kept = self.pos_embedding.data
    self.pos_embedding.data = kept.view(columns, rows, -1).transpose(0, 1).reshape(kept.shape)
    try:
        return tower_forward(self, images, tap)
    finally:
        self.pos_embedding.data = kept


class SiluOnce:
    """torch.nn.functional whose silu works on the first call of a pair only: not on the finished condition."""

    def __init__(self) -> None:
        self.calls = 0

    def silu(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.silu(x) if self.calls % 2 else x


def real_dimensions_only(
    model: pi0.Pi0, observation: Any, actions: Tensor, noise: Tensor, time: Tensor, tap: Any, posemb: Any
) -> Tensor:
    flow_loss(model, observation, actions, noise, time, tap, posemb)
    tap["loss_chunk"] = tap["loss_per_element"][..., :-1].mean(-1)
    tap["loss"] = tap["loss_chunk"].mean()
    return tap["loss_chunk"]


def bfloat16_masters(model_set: ModelSet, dtype: Any, device: str, params: torch.dtype = torch.float32) -> pi0.Pi0:
    model = load_model(model_set, dtype, device, params)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def reverse_time(self: pi0.Pi0, observation: Any, noise: Tensor, num_steps: int = 10, tap: Any = None) -> Tensor:
    """Euler steps that sample the velocity at the end of each interval instead of its start."""
    step = self._suffix_step

    def late(obs: Any, x_t: Tensor, time_B: Tensor, *rest: Any) -> Tensor:
        return step(obs, x_t, time_B - 1 / num_steps, *rest)

    with mock.patch.object(self, "_suffix_step", late):
        return sample_actions(self, observation, noise, num_steps, tap)


def positions_from_prefix_width(
    self: pi0.Pi0, observation: Any, x_t: Tensor, time_B: Tensor, prefix: Any, cache: Any, tap: Any
) -> Tensor:
    """Suffix positions that count the prefix's padding."""
    shift = prefix.valid_BN.shape[1] - prefix.valid_BN.sum(1, keepdim=True)
    with mock.patch.object(pi0, "positions_of", lambda valid: positions_of(valid) + shift):
        return suffix_step(self, observation, x_t, time_B, prefix, cache, tap)


class LoraFfnScaled(gemma.Expert):
    """The FFN adapters scaled by alpha/rank, as every other LoRA library does."""

    def __init__(self, config: Any, *, adaptive: bool) -> None:
        super().__init__(config, adaptive=adaptive)
        if config.lora_ffn is not None:
            for projection in (self.gate_up, self.down):
                assert projection.lora is not None
                projection.lora.scaling = config.lora_ffn.scaling


def update_with(change: Callable[[optim.Optimizer], None]) -> Callable[..., Any]:
    def update(self: optim.Optimizer) -> Tensor:
        change(self)
        return optimizer_update(self)

    return update


def never_clipped(self: optim.Optimizer) -> Tensor:
    with mock.patch.object(self, "config", dataclasses.replace(self.config, clip_gradient_norm=1e9)):
        return optimizer_update(self)


def clip_per_parameter(self: optim.Optimizer) -> Tensor:
    norm = self._gradient_norm()
    for p in self.parameters.values():
        if p.grad is not None:
            torch.nn.utils.clip_grad_norm_([p], self.config.clip_gradient_norm)
    never_clipped(self)
    return norm


def rounded_moments(self: optim.Optimizer) -> None:
    for moments in (self.m, self.v):
        for value in moments.values():
            value.copy_(value.bfloat16())


def rounded_weights(self: optim.Optimizer) -> None:
    for p in self.parameters.values():
        p.data.copy_(p.data.bfloat16())


def skipped_first_average(self: optim.Optimizer) -> Tensor:
    """The EMA starts one update late."""
    norm = optimizer_update(self)
    if self.step == 1 and self.ema is not None:
        for name, p in self.parameters.items():
            self.ema[name].copy_(p.detach())
    return norm


def frozen_average(self: optim.Optimizer) -> Tensor:
    kept, self.ema = self.ema, None
    norm = optimizer_update(self)
    self.ema = kept
    return norm


def other_config(**changes: Any) -> Callable[..., Any]:
    def config(settings: dict[str, Any], clip: float | None) -> Any:
        return dataclasses.replace(optim_config(settings, clip), **changes)

    return config


def late_rate(config: Any, step: int) -> float:
    return learning_rate(config, step + 1)


def rate_from_zero(config: Any, step: int) -> float:
    return config.peak_lr * step / config.warmup_steps if step < config.warmup_steps else learning_rate(config, step)


def changed_draws(**changes: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def changed(images: Tensor, draws: Any, cameras: tuple[str, ...]) -> Tensor:
        values = {name: change(getattr(draws, name)) for name, change in changes.items()}
        return augment_images(images, dataclasses.replace(draws, **values), cameras)

    return changed


def clipped(images: Tensor, draws: Any, cameras: tuple[str, ...]) -> Tensor:
    return augment_images(images, draws, cameras).clamp(-0.9, 0.9)


def wrist_is_turned(images: Tensor, draws: Any, cameras: tuple[str, ...]) -> Tensor:
    turned = dataclasses.replace(draws, theta=draws.theta + 0.02)
    return augment_images(images, turned, tuple(c.replace("wrist", "hand") for c in cameras))


def saturated(images: Tensor, draws: Any, cameras: tuple[str, ...]) -> Tensor:
    """Saturation × 1.2 where colours are jittered."""
    unit = augment_images(images, draws, cameras) / 2 + 0.5
    value = unit.amax(-1, keepdim=True)
    factor = 1 + 0.2 * draws.jitter[:, :, None, None, None].float()
    return (value - (value - unit) * factor) * 2 - 1


def rgb_brightness(images: Tensor, draws: Any, cameras: tuple[str, ...]) -> Tensor:
    """RGB times a factor instead of the HSV value bent."""
    dark = dataclasses.replace(draws, brightness=torch.zeros_like(draws.brightness))
    unit = augment_images(images, dark, cameras) / 2 + 0.5
    return (unit * (1 + draws.brightness * draws.jitter)[:, :, None, None, None]) * 2 - 1


def resampled_twice(images: Tensor, center: Tensor, theta: Tensor) -> Tensor:
    cropped = crop_and_rotate(images, center, torch.zeros_like(theta))
    with mock.patch.object(augment, "CROP", 1.0):
        return crop_and_rotate(cropped, torch.zeros_like(center), theta)


def bilinear_without_antialias(image: np.ndarray, height: int, width: int) -> np.ndarray:
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    size = (int(image.shape[0] / ratio), int(image.shape[1] / ratio))
    small = F.interpolate(tensor, size=size, mode="bilinear")[0].permute(1, 2, 0).round().byte().numpy()
    canvas = np.zeros((height, width, 3), np.uint8)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    canvas[top : top + size[0], left : left + size[1]] = small
    return canvas


def normalize_without_epsilon(x: np.ndarray, stats: Any, *, use_quantiles: bool) -> np.ndarray:
    width = x.shape[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        if use_quantiles:
            return (x - stats.q01[:width]) / (stats.q99[:width] - stats.q01[:width]) * 2.0 - 1.0
        return (x - stats.mean[:width]) / stats.std[:width]


def z_score_epsilon_1e8(x: np.ndarray, stats: Any, *, use_quantiles: bool) -> np.ndarray:
    if use_quantiles:
        return normalize(x, stats, use_quantiles=True)
    return (x - stats.mean[: x.shape[-1]]) / (stats.std[: x.shape[-1]] + 1e-8)


def unnormalize_without_epsilon(x: np.ndarray, stats: Any, *, use_quantiles: bool) -> np.ndarray:
    with mock.patch("piston.data.norm.EPSILON", 0.0):
        return unnormalize(x, stats, use_quantiles=use_quantiles)


def clipped_bins(states: np.ndarray) -> np.ndarray:
    return discretize_state(states).clip(0, 255)


class PlainQuantiles(RunningStats):
    """Quantiles of all samples instead of the histogram's left edges."""

    def update(self, batch: np.ndarray) -> None:
        self.seen = [*getattr(self, "seen", []), batch.reshape(-1, batch.shape[-1])]
        super().update(batch)

    def _quantile(self, q: float) -> np.ndarray:
        return np.quantile(np.concatenate(self.seen), q, axis=0)


attention_mask, attend, positions_of = attention.attention_mask, attention.attend, attention.positions_of
flow_loss, load_model, tower_forward = flow.flow_loss, execute.load_model, siglip.Siglip.forward
sample_actions, suffix_step = pi0.Pi0.sample_actions, pi0.Pi0._suffix_step
optimizer_update, optim_config, learning_rate = optim.Optimizer.update, curve.optim_config, optim.learning_rate
augment_images, crop_and_rotate = augment.augment, augment.crop_and_rotate
discretize_state, normalize, unnormalize = preprocess.discretize_state, preprocess.normalize, preprocess.unnormalize
time_embedding = pi0.time_embedding
SIGLIP_EPS, RMS_EPS = (siglip, "LAYER_NORM_EPS", 1e-5), (gemma, "RMS_NORM_EPS", 1e-5)
BOTH_GELUS = ((siglip, "gelu", erf_gelu), (gemma, "gelu", erf_gelu))

MISTAKES = (
    Mistake("exact GELU instead of its tanh form", "forward", BOTH_GELUS),
    Mistake("exact GELU in the activations alone", "units", ((units, "gelu", erf_gelu),)),
    Mistake("LayerNorm epsilon 1e-5", "units", (SIGLIP_EPS,)),
    Mistake("RMSNorm epsilon 1e-5", "units", (RMS_EPS,)),
    Mistake("time embedding in float64", "units", ((pi0, "_time_frequencies", float64_frequencies),)),
    Mistake("time periods that leave out 4 s", "forward", ((pi0, "_time_frequencies", geometric_frequencies),)),
    Mistake("prefix sees suffix", "forward", ((pi0, "attention_mask", all_bidirectional),)),
    Mistake("action tokens causal", "forward", ((pi0, "attention_mask", actions_causal),)),
    Mistake("padding visible", "forward", ((pi0, "attention_mask", padding_ignored),)),
    Mistake("padding counts in positions", "forward", ((pi0, "positions_of", counting_padding),)),
    Mistake("a masked camera is seen", "forward", ((pi0.Pi0, "embed_prefix", with_prefix(masked_camera_seen)),)),
    Mistake("RoPE on interleaved pairs", "forward", ((gemma, "rotate", interleaved),)),
    Mistake("RoPE in the compute dtype", "bits", ((gemma, "rotate", rotate_in_compute_dtype),)),
    Mistake("softmax in the compute dtype", "bits", ((gemma, "attend", softmax_in_compute_dtype),)),
    Mistake("key heads as the fast index", "forward", ((gemma, "attend", heads_interleaved),), grouped=True),
    Mistake(
        "adaRMS scale and shift swapped",
        "forward",
        ((gemma.AdaRMSNorm, "forward", ada_norm(lambda scale, shift, gate: (shift, scale, gate))),),
        pi05=True,
    ),
    Mistake(
        "adaRMS gate 1 + gate",
        "forward",
        ((gemma.AdaRMSNorm, "forward", ada_norm(lambda scale, shift, gate: (scale, shift, 1 + gate))),),
        pi05=True,
    ),
    Mistake("no silu on the time condition", "forward", ((pi0, "F", SiluOnce()),), pi05=True),
    Mistake("cameras in another order", "forward", ((pi0.Pi0, "embed_prefix", with_prefix(rotated_cameras)),)),
    Mistake("BGR images", "forward", ((pi0.Pi0, "embed_prefix", with_prefix(reversed_channels)),)),
    Mistake("text embedding not scaled by √width", "forward", ((gemma.Gemma, "embed", unscaled_embedding),)),
    Mistake(
        "image tokens divided by √width",
        "forward",
        ((siglip.Siglip, "forward", tower(lambda self, y: y / math.sqrt(y.shape[-1]))),),
    ),
    Mistake("patch positions column by column", "forward", ((siglip.Siglip, "forward", column_major_positions),)),
    Mistake("float32 weights rounded to bfloat16", "forward", ((forward, "load_model", bfloat16_masters),)),
    Mistake("a fused kernel's attention", "bits", ((gemma, "attend", fused_attention),)),
    Mistake("GELU in float32", "bits", ((siglip, "gelu", gelu_in_float32), (gemma, "gelu", gelu_in_float32))),
    Mistake("constants not rounded to bfloat16", "bits", ((layers, "rounded", lambda value, dtype: value),)),
    Mistake("vision softmax in float32", "bits", ((siglip, "unmasked_attention", tower_softmax_in_float32),)),
    Mistake("LayerNorm's variance in two passes", "units", ((siglip.LayerNorm, "forward", two_pass_layer_norm),)),
    Mistake("RMSNorm gain without the 1 +", "units", ((gemma.RMSNorm, "forward", gain_without_one),)),
    Mistake(
        "adaptive modulation in float32", "bits", ((gemma.AdaRMSNorm, "forward", modulation_in_float32),), pi05=True
    ),
    Mistake("time in bfloat16", "units", ((units, "time_embedding", time_in_bfloat16),)),
    Mistake("text embedding rounded twice", "bits", ((gemma.Gemma, "embed", embedding_rounded_twice),), rooted=True),
    Mistake("noise in bfloat16", "forward", ((execute, "flow_loss", noise_in_bfloat16),)),
    Mistake("loss leaves out a padded dimension", "forward", ((execute, "flow_loss", real_dimensions_only),)),
    Mistake("Euler steps at the interval's end", "forward", ((pi0.Pi0, "sample_actions", reverse_time),)),
    Mistake(
        "sampling counts the prefix's padding",
        "forward",
        ((pi0.Pi0, "_suffix_step", positions_from_prefix_width),),
    ),
    Mistake("LoRA not scaled on attention", "forward", ((lora, "rounded", lambda value, dtype: 1.0),), lora=True),
    Mistake("LoRA scaled on the FFN", "forward", ((gemma, "Expert", LoraFfnScaled),), lora=True),
    Mistake("no gradient through RMSNorm's statistics", "gradient", ((gemma, "_unit_rms", norm_without_gradient),)),
    Mistake("gradients not clipped", "curve", ((optim.Optimizer, "update", never_clipped),)),
    Mistake("clip parameter by parameter", "curve", ((optim.Optimizer, "update", clip_per_parameter),)),
    Mistake("Adam moments in bfloat16", "curve", ((optim.Optimizer, "update", update_with(rounded_moments)),)),
    Mistake("master weights in bfloat16", "curve", ((optim.Optimizer, "update", update_with(rounded_weights)),)),
    Mistake("Adam β2 0.999", "curve", ((curve, "optim_config", other_config(b2=0.999)),)),
    Mistake("weight decay 0.01", "curve", ((curve, "optim_config", other_config(weight_decay=0.01)),)),
    Mistake("EMA never updated", "curve", ((optim.Optimizer, "update", frozen_average),)),
    Mistake("EMA one update late", "curve", ((optim.Optimizer, "update", skipped_first_average),)),
    Mistake(
        "learning rate one step early",
        "curve",
        ((optim, "learning_rate", late_rate), (curve, "learning_rate", late_rate)),
    ),
    Mistake(
        "warm-up from zero",
        "curve",
        ((optim, "learning_rate", rate_from_zero), (curve, "learning_rate", rate_from_zero)),
    ),
    Mistake(
        "augmentation: one draw for the batch",
        "preprocess",
        ((preprocess, "augment", changed_draws(brightness=lambda t: t[:1].expand_as(t))),),
    ),
    Mistake("augmentation: no hue", "preprocess", ((preprocess, "augment", changed_draws(hue=torch.zeros_like)),)),
    Mistake(
        "augmentation: colours always jittered",
        "preprocess",
        ((preprocess, "augment", changed_draws(jitter=torch.ones_like)),),
    ),
    Mistake(
        "augmentation: turned the other way",
        "preprocess",
        ((preprocess, "augment", changed_draws(theta=torch.neg)),),
    ),
    Mistake("augmentation: saturation jittered", "preprocess", ((preprocess, "augment", saturated),)),
    Mistake("augmentation: brightness multiplies RGB", "preprocess", ((preprocess, "augment", rgb_brightness),)),
    Mistake("augmentation: resampled twice", "preprocess", ((augment, "crop_and_rotate", resampled_twice),)),
    Mistake(
        "augmentation: crops at whole pixels",
        "preprocess",
        ((preprocess, "augment", changed_draws(crop_center_yx=torch.round)),),
    ),
    Mistake("augmentation: result clipped", "preprocess", ((preprocess, "augment", clipped),)),
    Mistake("augmentation: wrist cameras turned too", "preprocess", ((preprocess, "augment", wrist_is_turned),)),
    Mistake(
        "resize without antialiasing",
        "preprocess",
        ((preprocess, "pillow_resize_with_pad", bilinear_without_antialias),),
    ),
    Mistake("no epsilon in normalisation", "preprocess", ((preprocess, "normalize", normalize_without_epsilon),)),
    Mistake("z-score epsilon 1e-8", "preprocess", ((preprocess, "normalize", z_score_epsilon_1e8),)),
    Mistake("no epsilon on the way out", "preprocess", ((preprocess, "unnormalize", unnormalize_without_epsilon),)),
    Mistake("state bins clipped to 0…255", "preprocess", ((preprocess, "discretize_state", clipped_bins),)),
    Mistake("exact quantiles in the statistics", "preprocess", ((preprocess, "RunningStats", PlainQuantiles),)),
)


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, wrong in mistake.patches:
            stack.enter_context(mock.patch.object(owner, name, wrong))
        yield


def narrowed(bundle: Bundle, mistake: Mistake) -> Bundle:
    """The smallest part of the bundle that has what the mistake touches: one model set, or the curves."""
    if mistake.where == "curve":
        return dataclasses.replace(bundle, models=())

    def fits(one: ModelSet) -> bool:
        heads, keys = one.arch["vlm"]["num_heads"], one.arch["vlm"]["num_kv_heads"]
        root = one.arch["vlm"]["width"] ** 0.5
        return (
            ("bfloat16" if mistake.where == "bits" else "float32") in one.dtypes
            and (mistake.pi05 is None or one.arch["pi05"] is mistake.pi05)
            and bool(one.arch.get("lora_vlm") or one.arch.get("lora_expert")) is mistake.lora
            and (1 < keys < heads or not mistake.grouped)
            and (layers.rounded(root, torch.bfloat16) != root or not mistake.rooted)
        )

    fitting = tuple(one for one in bundle.models if fits(one))
    return dataclasses.replace(bundle, models=fitting[-1:], curves=())


class Float32Only:
    """A model set that offers no other dtype, to spare its time."""

    dtypes = ("float32",)

    def __init__(self, model_set: ModelSet) -> None:
        self._set = model_set

    def __getattr__(self, name: str) -> Any:
        return getattr(self._set, name)


def bit_rows(model_set: ModelSet) -> list[Row]:
    """Share of entries of the bfloat16 forward pass that are not the reference's to the bit: ties of rounding, only."""
    reference = model_set.reference("bfloat16")
    masks = {k: reference[k] for k in ("prefix_mask", "suffix_mask")}
    model = execute.load_model(model_set, "bfloat16", "cpu")
    found = execute.forward_and_gradient(model_set, model, "cpu", gradient=False)
    ours, theirs = forward.valid_rows(found, masks), forward.valid_rows(reference, masks)
    names = [n for n in ours if n.startswith(("siglip/block", "image_tokens", "prefix_tokens", "kv_"))]
    return [
        Row(model_set.name, "bfloat16", "tap", n, float((ours[n] != theirs[n]).mean()), TIES, "share of other bits")
        for n in sorted(names, key=forward.position)
    ]


def rows_of(bundle: Bundle, mistake: Mistake) -> list[Row]:
    part = narrowed(bundle, mistake)
    if mistake.where == "units":
        return units.verify_units(bundle.root)
    if mistake.where == "preprocess":
        return preprocess.verify_preprocess(bundle.root)
    if mistake.where == "curve":
        return [row for c in part.curves for row in curve._compare(c, "curve", "cpu")]
    if not part.models:
        return []
    if mistake.where == "bits":
        return bit_rows(part.models[0])
    part = dataclasses.replace(part, models=tuple(Float32Only(one) for one in part.models))
    with (
        mock.patch.object(forward, "verify_units", return_value=[]),
        mock.patch.object(forward, "verify_preprocess", return_value=[]),
    ):
        return (gradient.verify_gradient if mistake.where == "gradient" else forward.verify_forward)(part).rows


def share(row: Row) -> float:
    return row.error / row.tolerance if row.tolerance else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("tests/golden"), help="tests/golden by default")
    parser.add_argument("--only", help="run the mistakes whose name contains this")
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    table = Table("mistake", "caught by", "first", "error / tolerance")
    counts = {"caught": 0, "missed": 0, "not tried": 0}
    console = Console()
    for mistake in MISTAKES:
        if args.only and args.only not in mistake.name:
            continue
        with made(mistake):
            rows = rows_of(bundle, mistake)
        failed = [row for row in rows if not row.ok]
        outcome = "caught" if failed else "missed" if rows else "not tried"
        counts[outcome] += 1
        first = (
            failed[0] if failed else max(rows, key=lambda r: r.error / r.tolerance if r.tolerance else 0, default=None)
        )
        detail = (
            ("", "") if first is None else (f"{first.set} {first.name}", f"{first.error:.1e} / {first.tolerance:.1e}")
        )
        table.add_row(mistake.name, mistake.where if failed else f"[bold red]{outcome}[/]", *detail)
    console.print(table)
    console.print(
        f"caught {counts['caught']} of {counts['caught'] + counts['missed']}; {counts['not tried']} not tried"
    )
    return 1 if counts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
