"""Costs from the configuration are what torch counts on the real model: parameters and FLOPs to the unit."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from piston.batch import Observation
from piston.config.recipes import PI0, PI05, recipe, recipe_names
from piston.config.schema import GEMMA_VARIANTS, GemmaConfig, LoraConfig, ModelConfig, SiglipConfig
from piston.model import cost
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0

ODD = GemmaConfig(width=48, depth=3, mlp_dim=80, num_heads=4, num_kv_heads=2, head_dim=16)
SMALL = ModelConfig(
    pi05=True,
    dtype="bfloat16",
    paligemma=ODD,
    action_expert=dataclasses.replace(ODD, width=32, mlp_dim=72),
    siglip=SiglipConfig(width=36, depth=3, mlp_dim=100, num_heads=3),
    vocab_size=101,
    image_size=(28, 42),
    cameras=("a", "b"),
    action_dim=5,
    action_horizon=7,
    max_token_len=11,
)
LORA = LoraConfig(rank=4, alpha=4.0)


def meta_step(config: ModelConfig, batch: int, *, checkpointing: bool = False, tap: bool = False) -> tuple[int, int]:
    """Forward and backward FLOPs of the real model on the meta device; `tap` makes it compute the dead last layer."""
    model = Pi0.on_meta(config)
    if checkpointing:
        for block in model.blocks():
            forward = block.forward
            block.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    with torch.device("meta"):
        (height, width), cameras = config.image_size, len(config.cameras)
        observation = Observation(
            torch.zeros(batch, cameras, height, width, 3),
            torch.ones(batch, cameras, dtype=torch.bool),
            torch.zeros(batch, config.action_dim),
            torch.zeros(batch, config.max_token_len, dtype=torch.int32),
            torch.ones(batch, config.max_token_len, dtype=torch.bool),
        )
        actions = torch.zeros(batch, config.action_horizon, config.action_dim)
        time = torch.zeros(batch)
    with FlopCounterMode(display=False) as forward:
        loss = flow_loss(model, observation, actions, actions, time, {} if tap else None).mean()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


VARIANTS = {
    "pi05": SMALL,
    "pi0": dataclasses.replace(SMALL, pi05=False),
    "one camera": dataclasses.replace(SMALL, cameras=("a",), max_token_len=3),
    "lora": dataclasses.replace(
        SMALL,
        paligemma=dataclasses.replace(ODD, lora_attn=LORA, lora_ffn=LORA),
        action_expert=dataclasses.replace(SMALL.action_expert, lora_attn=LORA),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_torchs_counter_on_the_real_model(name: str) -> None:
    config = VARIANTS[name]
    forward, backward = meta_step(config, 2)
    # On the meta device torch spells attention out; a LoRA model in which every weight trains is what Pi0 builds.
    mine = cost.flops(config, fused_attention=False, fused_vision=False)
    trains = [dataclasses.replace(i, trained=True).backward for i in cost.linears(config)]
    mine_backward = sum(trains) + sum(a.backward(False) for a in cost.attentions(config))
    assert forward == 2 * mine.forward
    assert backward == 2 * mine_backward
    if name != "lora":
        assert mine.backward == mine_backward


def test_flops_of_the_computed_dead_layer_equal_torchs_counter() -> None:
    forward, backward = meta_step(SMALL, 2, tap=True)
    mine = cost.flops(SMALL, "computed", fused_attention=False, fused_vision=False)
    assert (forward, backward) == (2 * mine.forward, 2 * mine.backward)


def test_flops_of_the_full_size_model_equal_torchs_counter() -> None:
    forward, backward = meta_step(PI05, 1)
    mine = cost.flops(PI05, fused_attention=False, fused_vision=False)
    assert (forward, backward) == (mine.forward, mine.backward)


@pytest.mark.parametrize("name", ["pi05", "pi0"])
def test_recomputation_is_what_checkpointing_really_repeats(name: str) -> None:
    config = VARIANTS[name]
    plain, again = meta_step(config, 2)[1], meta_step(config, 2, checkpointing=True)[1]
    assert again - plain == 2 * cost.recompute(config)


# forward, backward, total of "computed"; total of "skipped"; TFLOP per sample: performance notes, FlopCounter, 2026
PUBLISHED = {
    (3, 200, 50): (4.682, 9.045, 13.726, 13.470),
    (3, 200, 10): (4.645, 8.965, 13.610, 13.356),
    (2, 200, 50): (3.379, 6.511, 9.890, 9.707),
    (2, 200, 10): (3.346, 6.439, 9.785, 9.603),
    (2, 64, 50): (2.813, 5.420, 8.232, 8.087),
    (2, 64, 10): (2.780, 5.352, 8.133, 7.988),
    (2, 48, 50): (2.746, 5.292, 8.039, 7.897),
}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_flops_equal_the_published_table(shape: tuple[int, int, int]) -> None:
    cameras, text, horizon = shape
    config = dataclasses.replace(PI05, cameras=PI05.cameras[:cameras], max_token_len=text, action_horizon=horizon)
    computed, skipped = cost.flops(config, "computed"), cost.flops(config, "skipped")
    mine = (computed.forward, computed.backward, computed.model, skipped.model)
    assert [round(v / 1e12, 3) for v in mine] == pytest.approx(PUBLISHED[shape], abs=0.0011)


def test_full_checkpointing_costs_what_the_notes_measured() -> None:
    """17.02 TFLOP at 3/200/50: there the prefix is finished last and π0.5's suffix product is not repeated either."""
    again = cost.recompute(PI05, "computed", prefix_last=True)
    suffix_down = next(i for i in cost.linears(PI05) if (i.module, i.name) == ("expert", "down")).forward
    total = cost.flops(PI05, "computed").model + again - suffix_down
    assert total / 1e12 == pytest.approx(17.02, abs=0.005)
    assert again / cost.flops(PI05, "computed").forward == pytest.approx(0.70, abs=0.01)


GROUPS = {
    "siglip": r"siglip\.(?!head)",
    "projector": r"siglip\.head\.",
    "embedding": r"gemma\.embedding$",
    "gemma": r"gemma\.(blocks\.\d+\.prefix|prefix_norm)\.",
    "expert": r"gemma\.(blocks\.\d+\.suffix|suffix_norm)\.(?!.*modulation)",
    "adarms": r".*modulation",
    "heads": r"(action|time|state)_",
}


@pytest.mark.parametrize("config", [*VARIANTS.values(), PI0, PI05], ids=[*VARIANTS, "pi0 full", "pi05 full"])
def test_parameters_by_module_equal_the_model(config: ModelConfig) -> None:
    counted = dict.fromkeys(cost.MODULES, 0)
    for name, p in Pi0.on_meta(config).named_parameters():
        (module,) = [m for m, pattern in GROUPS.items() if re.match(pattern, name)]
        counted[module] += p.numel()
    assert cost.parameters(config) == counted


def test_full_size_parameters_are_the_references() -> None:
    assert cost.total_parameters(PI0) == 3_238_048_528
    assert cost.total_parameters(PI05) == 3_353_433_872
    million = {k: round(v / 1e6, 1) for k, v in cost.parameters(PI05).items()}
    assert million == {
        "siglip": 412.4, "projector": 2.4, "embedding": 526.6, "gemma": 1981.9, "expert": 311.4, "adarms": 116.5,
        "heads": 2.2,
    }  # fmt: skip
    assert cost.dead_parameters(PI05) / 1e6 == pytest.approx(109.06, abs=0.005)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_exact_parameters(name: str) -> None:
    config = recipe(name).model
    assert cost.total_parameters(config) == sum(p.numel() for p in Pi0.on_meta(config).parameters())


def test_dead_parameters_are_those_without_a_gradient() -> None:
    model = Pi0.build(SMALL, device="cpu", seed=0)
    (height, width), cameras = SMALL.image_size, len(SMALL.cameras)
    observation = Observation(
        torch.rand(1, cameras, height, width, 3),
        torch.ones(1, cameras, dtype=torch.bool),
        torch.zeros(1, SMALL.action_dim),
        torch.zeros(1, SMALL.max_token_len, dtype=torch.int32),
        torch.ones(1, SMALL.max_token_len, dtype=torch.bool),
    )
    actions = torch.rand(1, SMALL.action_horizon, SMALL.action_dim)
    flow_loss(model, observation, actions, actions, torch.rand(1)).mean().backward()
    assert cost.dead_parameters(SMALL) == sum(p.numel() for p in model.parameters() if p.grad is None)


def test_lora_trains_adapters_vision_and_heads() -> None:
    """openpi's freeze filter: all of the language model but its adapters; vision tower and heads train."""
    config = dataclasses.replace(
        PI0, paligemma=GEMMA_VARIANTS["gemma_2b_lora"], action_expert=GEMMA_VARIANTS["gemma_300m_lora"]
    )
    named = dict(Pi0.on_meta(config).named_parameters())
    trained = sum(p.numel() for name, p in named.items() if not name.startswith("gemma.") or ".lora." in name)
    assert cost.trained_parameters(config) == trained
    assert cost.trained_parameters(PI0) == cost.total_parameters(PI0)


def test_needs_no_torch() -> None:
    program = "import sys, piston.model.cost as c; from piston.config.recipes import PI05; c.flops(PI05)\n"
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
