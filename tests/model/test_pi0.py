"""The whole network: counts at full size, what may see what, sampling, and independence of padding."""

import dataclasses

import pytest
import torch

from piston.batch import Observation
from piston.config.schema import GEMMA_VARIANTS, GemmaConfig, LoraConfig, ModelConfig, SiglipConfig
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0
from piston.model.weights import entries, to_openpi_jax

SMALL = GemmaConfig(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)
TINY = ModelConfig(
    pi05=True,
    dtype="float32",
    paligemma=SMALL,
    action_expert=dataclasses.replace(SMALL, width=24),
    siglip=SiglipConfig(width=16, depth=2, mlp_dim=32, num_heads=2),
    vocab_size=64,
    image_size=(28, 42),
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    action_dim=6,
    action_horizon=5,
    max_token_len=7,
)


def tiny(**changes: object) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


def build(config: ModelConfig) -> Pi0:
    """A model whose zero-initialised parameters are random too, so that everything matters."""
    model = Pi0.build(config, device="cpu", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def observe(config: ModelConfig, batch: int = 3, seed: int = 0) -> Observation:
    g = torch.Generator().manual_seed(seed)
    height, width = config.image_size
    masks = torch.ones(batch, len(config.cameras), dtype=torch.bool)
    masks[0, 0] = False
    lengths = torch.tensor([config.max_token_len, 3, 1])[:batch]
    return Observation(
        images=torch.rand((batch, len(config.cameras), height, width, 3), generator=g) * 2 - 1,
        image_masks=masks,
        state=torch.randn((batch, config.action_dim), generator=g),
        tokenized_prompt=torch.randint(
            0, config.vocab_size, (batch, config.max_token_len), generator=g, dtype=torch.int32
        ),
        tokenized_prompt_mask=torch.arange(config.max_token_len)[None] < lengths[:, None],
    )


def chunk(config: ModelConfig, batch: int = 3, seed: int = 2) -> torch.Tensor:
    shape = (batch, config.action_horizon, config.action_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TIME = torch.tensor([0.9, 0.05, 0.5])


@pytest.mark.parametrize(("pi05", "parameters", "arrays"), [(False, 3_238_048_528, 50), (True, 3_353_433_872, 51)])
def test_parameter_counts_at_full_size(pi05: bool, parameters: int, arrays: int) -> None:
    config = ModelConfig(pi05=pi05)
    model = Pi0.on_meta(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(to_openpi_jax(config, model.state_dict())) == arrays
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


def test_parameter_count_of_openpi_dummy() -> None:
    dummy = GEMMA_VARIANTS["dummy"]
    model = Pi0.on_meta(ModelConfig(pi05=True, paligemma=dummy, action_expert=dummy))
    assert sum(p.numel() for p in model.parameters()) == 429_443_344


@pytest.mark.parametrize("pi05", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(3, 6.0)])
def test_the_weight_map_names_every_parameter_once(pi05: bool, lora: LoraConfig | None) -> None:
    gemma = dataclasses.replace(SMALL, lora_attn=lora, lora_ffn=lora)
    config = tiny(pi05=pi05, paligemma=gemma, action_expert=gemma)
    table = list(entries(config))
    ours = [e.ours.format(i=i) for e in table for i in range(max(e.layers, 1))]
    assert sorted(ours) == sorted(dict(Pi0.on_meta(config).named_parameters()))
    assert len({e.jax for e in table}) == len(table)


@pytest.mark.parametrize("pi05", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_velocity_and_loss_are_float32_whatever_the_compute_dtype(pi05: bool, dtype: str) -> None:
    config = tiny(pi05=pi05, dtype=dtype)
    model, observation = build(config), observe(config)
    loss = flow_loss(model, observation, chunk(config), chunk(config, seed=5), TIME)
    assert loss.dtype == torch.float32
    assert loss.shape == (3, config.action_horizon)
    loss.mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("pi05", [False, True])
def test_masked_pixels_and_padding_tokens_do_not_matter(pi05: bool) -> None:
    config = tiny(pi05=pi05)
    model, observation = build(config), observe(config)
    images, tokens = observation.images.clone(), observation.tokenized_prompt.clone()
    images[~observation.image_masks] = 0.123
    tokens[~observation.tokenized_prompt_mask] = 9
    other = dataclasses.replace(observation, images=images, tokenized_prompt=tokens)
    first, second = (model(o, chunk(config), TIME) for o in (observation, other))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_a_fully_masked_sample_stays_finite() -> None:
    config = tiny()
    model, observation = build(config), observe(config)
    nothing = dataclasses.replace(
        observation,
        image_masks=torch.zeros_like(observation.image_masks),
        tokenized_prompt_mask=torch.zeros_like(observation.tokenized_prompt_mask),
    )
    loss = flow_loss(model, nothing, chunk(config), chunk(config, seed=5), TIME).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("pi05", [False, True])
def test_skipping_the_last_prefix_layer_changes_nothing(pi05: bool) -> None:
    config = tiny(pi05=pi05)
    model, observation = build(config), observe(config)
    quick = flow_loss(model, observation, chunk(config), chunk(config, seed=5), TIME)
    quick.mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    full = flow_loss(model, observation, chunk(config), chunk(config, seed=5), TIME, tap={})
    full.mean().backward()
    torch.testing.assert_close(quick, full, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), f"{name} was skipped but has a gradient"
        else:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pi05", [False, True])
def test_the_cached_suffix_step_equals_the_joint_pass(pi05: bool) -> None:
    config = tiny(pi05=pi05)
    model, observation, noise = build(config), observe(config), chunk(config)
    tap: dict[str, torch.Tensor] = {}
    model.sample_actions(observation, noise, num_steps=4, tap=tap)
    x_t = noise
    for i, time in enumerate([1.0, 0.75, 0.5, 0.25]):
        velocity = model(observation, x_t, torch.full((3,), time))
        torch.testing.assert_close(velocity, tap["sample/v_steps"][i], rtol=1e-4, atol=1e-5)
        x_t = x_t - 0.25 * velocity
    torch.testing.assert_close(x_t, tap["sample/actions"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 100])
def test_sampling_takes_exactly_the_steps_asked_for(steps: int) -> None:
    config = tiny()
    tap: dict[str, torch.Tensor] = {}
    build(config).sample_actions(observe(config), chunk(config), num_steps=steps, tap=tap)
    assert tap["sample/times"].shape == (steps,)
    assert tap["sample/times"][-1] == pytest.approx(1 / steps, rel=1e-4)


def test_sampling_refuses_no_steps() -> None:
    config = tiny()
    with pytest.raises(ValueError, match="num_steps"):
        build(config).sample_actions(observe(config), chunk(config), num_steps=0)


def test_from_scratch_the_expert_is_the_identity() -> None:
    """adaRMS gates start at zero, so every suffix block passes its input through (reference initialisers)."""
    config = tiny()
    model, observation = Pi0.build(config, device="cpu", seed=0), observe(config)
    tap: dict[str, torch.Tensor] = {}
    model(observation, chunk(config), TIME, tap)
    x = tap["suffix_tokens"]
    torch.testing.assert_close(tap["suffix_out"], x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first, again, other = (Pi0.build(TINY, device="cpu", seed=s).state_dict() for s in (3, 3, 4))
    deeper = Pi0.build(tiny(siglip=dataclasses.replace(TINY.siglip, depth=3)), device="cpu", seed=3).state_dict()
    name = "gemma.blocks.1.prefix.q.weight"
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert torch.equal(first[name], deeper[name])
    assert not torch.equal(first[name], other[name])
