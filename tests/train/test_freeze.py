"""LoRA trains what openpi trains: the same arrays, the same counts, frozen parts in bfloat16, unchanged by training."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from piston.config.schema import GEMMA_VARIANTS, ModelConfig, RunConfig
from piston.model import cost
from piston.model.pi0 import Pi0
from piston.model.weights import entries
from piston.serve.policy import Policy
from piston.train import loop
from piston.train.checkpoint import load_policy_weights, open_checkpoint
from piston.train.freeze import GROUPS, counts, freeze, group_of, trainable

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


# --- freezing by name ------------------------------------------------------------------------------------------------

ALL_BUT_HEADS = ("vision", "vlm", "expert")


@pytest.mark.parametrize("groups", [("vision",), ("vlm",), ("expert",), ("heads",), ("vision", "vlm"), ALL_BUT_HEADS])
@pytest.mark.parametrize("pi05", [False, True])
def test_the_planner_counts_what_is_trained(groups: tuple[Any, ...], pi05: bool) -> None:
    for adapters in (False, True):
        config = dataclasses.replace(lora(vlm=adapters, expert=adapters, pi05=pi05), freeze=groups)
        model = Pi0.on_meta(config)
        freeze(model)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert cost.trained_parameters(config) == trained
        rows = counts(model.named_parameters())
        assert all(rows[group][0] == 0 for group in groups)
        assert not adapters or rows["LoRA"][0] == rows["LoRA"][1]


@pytest.mark.parametrize("groups", [("vision",), ("vlm",), ("expert",), ("heads",), ALL_BUT_HEADS])
def test_named_groups_stay_as_they_are(make_run: MakeRun, groups: tuple[Any, ...]) -> None:
    run = make_run(num_train_steps=2, ema_decay=0.9)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, pi05=False, discrete_state_input=False))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, freeze=groups))
    result, said = train(run)
    start, end = Pi0.build(run.model, device="cpu", seed=run.train.seed), open_checkpoint(result.checkpoint)
    tensors = end.tensors("model")
    for name, parameter in start.named_parameters():
        if group_of(name) in groups:
            assert torch.equal(tensors[name], parameter.bfloat16()), name
    moved = {group_of(name) for name, p in start.named_parameters() if not torch.equal(tensors[name].float(), p)}
    assert moved >= set(GROUPS) - set(groups)
    assert set(end.tensors("adam_m")) == {n for n, _ in start.named_parameters() if group_of(n) not in groups}
    for group in groups:
        row = next(line for line in said.splitlines() if f"│ {group} " in line)
        assert row.split("│")[2].strip() == "0"


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="something left to train"):
        ModelConfig(freeze=GROUPS)
    dataclasses.replace(lora(), freeze=GROUPS)  # the adapters are left


def test_a_policy_computes_as_training_did(make_run: MakeRun) -> None:
    """The frozen part is bfloat16 in both, so that their actions are equal to the bit."""
    result, _ = train(adapted(make_run(num_train_steps=1, ema_decay=None)))
    policy = Policy.from_checkpoint(result.checkpoint)
    trained = Pi0.on_meta(policy.run.model)
    freeze(trained)
    trained.to_empty(device="cpu").load_state_dict(load_policy_weights(result.checkpoint))
    dtypes = {name: parameter.dtype for name, parameter in trained.named_parameters()}
    assert {name: parameter.dtype for name, parameter in policy.model.named_parameters()} == dtypes
    black = torch.zeros(28, 28, 3, dtype=torch.uint8).numpy()
    sample = {"images": {"base_0_rgb": black}, "state": torch.zeros(4).numpy(), "prompt": "lift the red cube"}
    served = policy.infer(sample)
    policy.model = trained.eval()
    assert (policy.infer(sample) == served).all()
    assert dtypes["gemma.embedding"] == torch.bfloat16
