"""Tiny π0 and π0.5 checkpoints with every parameter random, so that a swapped tensor shows."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from piston.config.robots import generic
from piston.config.schema import DataConfig, GemmaConfig, LoraConfig, ModelConfig, RunConfig, SiglipConfig
from piston.config.serialize import to_json
from piston.weights.links import our_shapes
from piston.weights.opened import RUN_KEY

VLM = GemmaConfig(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=16)
LORA = {"lora_attn": LoraConfig(3, 6.0), "lora_ffn": LoraConfig(2, 2.0)}

Make = Callable[..., tuple[Path, dict[str, Tensor], RunConfig]]


def tiny_run(*, pi05: bool, lora: bool = False) -> RunConfig:
    """No two sizes are equal where the layouts differ, so that a wrong transpose cannot pass."""
    vlm = dataclasses.replace(VLM, **(LORA if lora else {}))
    model = ModelConfig(
        pi05=pi05,
        paligemma=vlm,
        action_expert=dataclasses.replace(vlm, width=20, mlp_dim=24),
        siglip=SiglipConfig(width=30, depth=3, mlp_dim=44, num_heads=2, patch_size=(14, 7)),
        vocab_size=96,
        image_size=(28, 14),
        action_dim=6,
        action_horizon=5,
        max_token_len=12,
        discrete_state_input=pi05,
    )
    robot = generic(cameras={"base_0_rgb": "image"}, state_dim=4, action_dim=3, delta_mask=(2, -1))
    return RunConfig("tiny", model, DataConfig(repo_id="me/tiny", robot=robot, use_quantile_norm=pi05))


def random_state(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in our_shapes(model).items()}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(pi05=…, lora=…, dtype=…) → (file in our layout, its tensors, its run)."""

    def build(
        *, pi05: bool = True, lora: bool = False, dtype: torch.dtype = torch.float32
    ) -> tuple[Path, dict[str, Tensor], RunConfig]:
        run = tiny_run(pi05=pi05, lora=lora)
        state = random_state(run.model, dtype)
        path = tmp_path / "source.safetensors"
        save_file(state, path, metadata={RUN_KEY: to_json(run)})
        return path, state, run

    return build
