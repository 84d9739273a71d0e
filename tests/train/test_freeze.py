"""LoRA trains what openpi trains: the same arrays, the same counts, frozen parts in bfloat16, unchanged by training."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from piston.config.schema import GEMMA_VARIANTS, ModelConfig, RunConfig
from piston.model.pi0 import Pi0
from piston.model.weights import entries
from piston.train import loop
from piston.train.checkpoint import load_policy_weights, open_checkpoint
from piston.train.freeze import counts, freeze, trainable

MakeRun = Callable[..., RunConfig]


def frozen_arrays(model: ModelConfig) -> set[str]:
    """The JAX arrays whose layers are all frozen here."""
    return {e.jax.removeprefix("PaliGemma/llm/") for e in entries(model) if not trainable(model, e.ours.format(i=0))}


def lora(*, vlm: bool = True, expert: bool = True, pi05: bool = False) -> ModelConfig:
    return ModelConfig(
        pi05=pi05,
        paligemma=GEMMA_VARIANTS["gemma_2b_lora" if vlm else "gemma_2b"],
        action_expert=GEMMA_VARIANTS["gemma_300m_lora" if expert else "gemma_300m"],
    )


def test_seventeen_frozen_arrays_of_the_double_lora() -> None:
    attention = {
        f"layers/attn/{name}{part}/w" for name in ("q_einsum", "kv_einsum", "attn_vec_einsum") for part in ("", "_1")
    }
    mlp = {f"layers/mlp{part}/{name}" for name in ("gating_einsum", "linear") for part in ("", "_1")}
    norms = {f"layers/pre_{name}_norm{part}/scale" for name in ("attention", "ffw") for part in ("", "_1")}
    rest = {"embedder/input_embedding", "final_norm/scale", "final_norm_1/scale"}
    assert frozen_arrays(lora()) == attention | mlp | norms | rest
    assert len(frozen_arrays(lora())) == 17


def test_one_adapted_expert_freezes_itself_alone() -> None:
    vlm, expert = frozen_arrays(lora(expert=False)), frozen_arrays(lora(vlm=False))
    assert not any("_1" in name for name in vlm)
    assert all("_1" in name for name in expert)
    assert "embedder/input_embedding" in vlm
    assert vlm | expert == frozen_arrays(lora())
    assert not vlm & expert
    assert frozen_arrays(lora(vlm=False, expert=False)) == set()


def test_adaptive_norms_of_a_frozen_expert_are_frozen() -> None:
    names = frozen_arrays(lora(pi05=True))
    assert {"final_norm_1/Dense_0/kernel", "layers/pre_ffw_norm_1/Dense_0/bias"} <= names


def test_counts_at_full_size() -> None:
    """By hand: rank times the widths of each factor, 18 layers; So400m and the projections whole."""
    model = Pi0.on_meta(lora())
    freeze(model)
    rows = counts(model.named_parameters())

    def adapters(d: int, f: int, r: int) -> int:
        q, kv, o = 8 * (d * r + r * 256), 2 * (d * r + r * 256), 8 * (256 * r + r * d)
        return 18 * (q + kv + o + 2 * (d * r + r * f) + f * r + r * d)

    assert rows["LoRA"] == (adapters(2048, 16_384, 16) + adapters(1024, 4096, 32),) * 2
    assert rows["vision"][0] == rows["vision"][1]
    assert rows["heads"][0] == rows["heads"][1]
    assert rows["vlm"][0] == rows["expert"][0] == 0
    total = sum(whole for _, whole in rows.values())
    assert total - rows["LoRA"][1] == 3_238_048_528  # openpi's π0


def adapted(run: RunConfig) -> RunConfig:
    small = {
        "lora_attn": GEMMA_VARIANTS["gemma_2b_lora"].lora_attn,
        "lora_ffn": GEMMA_VARIANTS["gemma_2b_lora"].lora_ffn,
    }
    vlm, expert = (dataclasses.replace(g, **small) for g in (run.model.paligemma, run.model.action_expert))
    # π0, since a frozen π0.5 expert from scratch has all gates at zero and passes no gradient on.
    pi0 = dataclasses.replace(run.model, pi05=False, discrete_state_input=False, paligemma=vlm, action_expert=expert)
    return dataclasses.replace(run, model=pi0)


def train(run: RunConfig) -> tuple[loop.TrainResult, str]:
    console = Console(file=io.StringIO(), width=200)
    result = loop.train(run, console)
    return result, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_training_moves_adapters_and_leaves_the_frozen_part(make_run: MakeRun) -> None:
    run = adapted(make_run(num_train_steps=3, ema_decay=None))
    result, said = train(run)
    fresh = Pi0.on_meta(run.model)
    freeze(fresh)
    fresh.to_empty(device="cpu")
    loop.initialise(fresh, run.train.seed)
    start, end = dict(fresh.named_parameters()), open_checkpoint(result.checkpoint).tensors("model")
    for name, parameter in start.items():
        if trainable(run.model, name):
            assert parameter.dtype == torch.float32, name
        else:
            assert end[name].dtype == parameter.dtype == torch.bfloat16, name
            assert torch.equal(end[name], parameter), name
    moved = {name for name in start if not torch.equal(end[name], start[name].detach())}
    assert {name for name in start if ".lora." in name and ".blocks.0." in name} <= moved
    moments = open_checkpoint(result.checkpoint).tensors("adam_m")
    assert set(moments) == {name for name in start if trainable(run.model, name)}
    assert not open_checkpoint(result.checkpoint).has("ema")
    assert "LoRA" in said
    assert "share" in said
    assert set(load_policy_weights(result.checkpoint)) == set(start)


def test_a_lora_run_resumes_bit_for_bit(make_run: MakeRun, tmp_path: Path) -> None:
    whole, _ = train(adapted(make_run(num_train_steps=4, exp_name="whole", ema_decay=None)))
    half: dict[str, Any] = {"exp_name": "half", "ema_decay": None}
    train(adapted(make_run(num_train_steps=2, **half)))
    resumed, _ = train(adapted(make_run(num_train_steps=4, resume=True, **half)))
    for group in ("model", "adam_m", "adam_v"):
        one, other = (open_checkpoint(r.checkpoint).tensors(group) for r in (whole, resumed))
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_initialised_values_are_rounded_once() -> None:
    model, full = ModelConfig(), GEMMA_VARIANTS["gemma_2b_lora"]
    tiny = dataclasses.replace(GEMMA_VARIANTS["dummy"], lora_attn=full.lora_attn, lora_ffn=full.lora_ffn)
    small = dataclasses.replace(
        model, paligemma=tiny, action_expert=tiny, vocab_size=64, image_size=(14, 14),
        siglip=dataclasses.replace(model.siglip, depth=1, width=32, mlp_dim=16, num_heads=2),
    )  # fmt: skip
    frozen = Pi0.on_meta(small)
    freeze(frozen)
    frozen.to_empty(device="cpu")
    loop.initialise(frozen, 3)
    plain = Pi0.build(small, device="cpu", seed=3)
    for (name, ours), (_, theirs) in zip(frozen.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype)), name
