"""Recipes resolve to openpi's values, field by field; unknown names get a suggestion."""

import dataclasses
from pathlib import Path

import pytest

from piston.config.recipes import DEMO_ROOT, SHIPPED_VOCAB_SIZE, recipe, recipe_names
from piston.config.robots import ALOHA, ALOHA_SIM, DROID, LIBERO, LIBERO_EXTRA_DELTA, PLANAR_ARM
from piston.config.schema import CAMERAS, GEMMA_VARIANTS, PALIGEMMA_VOCAB_SIZE, SHIPPED_TOKENIZER, SO400M
from piston.config.serialize import from_json, to_json

# name: π0.5, discrete state, horizon, robot, data set, prompt from task, default prompt, batch, steps,
#       (warm-up, peak, decay steps, final), EMA
OPENPI = {
    "pi0_libero": (
        False, False, 50, LIBERO_EXTRA_DELTA, "physical-intelligence/libero", True, None, 32, 30_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), 0.99,
    ),
    "pi0_libero_low_mem_finetune": (
        False, False, 50, LIBERO_EXTRA_DELTA, "physical-intelligence/libero", True, None, 32, 30_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), None,
    ),
    "pi05_libero": (
        True, False, 10, LIBERO, "physical-intelligence/libero", True, None, 256, 30_000,
        (10_000, 5e-5, 1_000_000, 5e-5), 0.999,
    ),
    "pi0_aloha_pen_uncap": (
        False, False, 50, ALOHA, "physical-intelligence/aloha_pen_uncap_diverse", False, "uncap the pen", 32, 20_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), 0.99,
    ),
    "pi05_aloha_pen_uncap": (
        True, True, 50, ALOHA, "physical-intelligence/aloha_pen_uncap_diverse", False, "uncap the pen", 64, 20_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), 0.99,
    ),
    "pi0_aloha_sim": (
        False, False, 50, ALOHA_SIM, "lerobot/aloha_sim_transfer_cube_human", False, "Transfer cube", 32, 20_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), 0.99,
    ),
    "pi05_droid_finetune": (
        True, True, 16, DROID, "my_droid_dataset", True, None, 32, 20_000,
        (1000, 2.5e-5, 30_000, 2.5e-6), 0.99,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENPI)
def test_values_are_openpis(name: str) -> None:
    run = recipe(name)
    model, data, optim, train = run.model, run.data, run.optim, run.train
    assert (
        model.pi05, model.discrete_state_input, model.action_horizon, data.robot, data.repo_id, data.prompt_from_task,
        data.default_prompt, train.batch_size, train.num_train_steps,
        (optim.warmup_steps, optim.peak_lr, optim.decay_steps, optim.decay_lr), optim.ema_decay,
    ) == OPENPI[name]  # fmt: skip
    assert run.name == name
    assert model.dtype == "bfloat16"
    lora = "_lora" if "low_mem" in name else ""
    assert model.paligemma == GEMMA_VARIANTS[f"gemma_2b{lora}"]
    assert model.action_expert == GEMMA_VARIANTS[f"gemma_300m{lora}"]
    assert (model.siglip, model.vocab_size, model.image_size) == (SO400M, PALIGEMMA_VOCAB_SIZE, (224, 224))
    assert (model.cameras, model.action_dim) == (CAMERAS, 32)
    assert model.max_token_len == (200 if model.pi05 else 48)
    assert data.use_quantile_norm == model.pi05
    assert data.augment
    assert data.tokenizer is None  # a pretrained model's tokenizer is the user's to give
    assert data.norm_stats is None
    assert (optim.schedule, optim.b1, optim.b2, optim.eps) == ("cosine", 0.9, 0.95, 1e-8)
    assert (optim.weight_decay, optim.clip_gradient_norm, train.seed) == (1e-10, 1.0, 42)
    assert (train.log_interval, train.save_interval, train.keep_period, data.num_workers) == (100, 1000, 5000, 2)


@pytest.mark.parametrize(("name", "pi05"), [("debug", False), ("debug_pi05", True)])
def test_debug_recipes_are_openpis_but_for_vision_vocabulary_and_data(name: str, pi05: bool) -> None:
    run = recipe(name)
    dummy = GEMMA_VARIANTS["dummy"]
    assert (run.model.paligemma, run.model.action_expert) == (dummy, dummy)
    assert (run.model.pi05, run.model.discrete_state_input) == (pi05, pi05)
    assert (run.model.action_horizon, run.model.action_dim) == (50, 32)
    assert (run.train.batch_size, run.train.num_train_steps, run.train.overwrite) == (2, 10, True)
    assert run.train.exp_name == name
    assert run.optim == recipe("pi0_libero").optim


@pytest.mark.parametrize("name", ["debug", "debug_pi05", "debug_cpu", "demo"])
def test_small_recipes_run_from_what_we_ship(name: str) -> None:
    run = recipe(name)
    assert run.data.robot == PLANAR_ARM
    assert run.data.tokenizer == SHIPPED_TOKENIZER
    assert run.model.vocab_size == SHIPPED_VOCAB_SIZE
    assert run.data.root == DEMO_ROOT
    assert run.data.use_quantile_norm == run.model.pi05


@pytest.mark.parametrize("name", ["debug_cpu", "demo"])
def test_cpu_recipes_compute_in_float32_on_the_cpu(name: str) -> None:
    run = recipe(name)
    assert (run.model.dtype, run.train.device, run.model.pi05) == ("float32", "cpu", True)
    assert set(run.data.robot.cameras) < set(run.model.cameras)


def test_every_recipe_survives_run_json() -> None:
    for name in recipe_names():
        assert from_json(to_json(recipe(name))) == recipe(name)
        assert recipe(name).name == name


def test_recipes_are_fresh_and_can_be_varied() -> None:
    run = recipe("pi05_libero")
    other = dataclasses.replace(run, data=dataclasses.replace(run.data, root=Path("elsewhere")))
    assert recipe("pi05_libero") == run != other


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("pi05_libro", "pi05_libero"), ("pi0-aloha-sim", "pi0_aloha_sim"), ("DEMO", "demo"), ("", ""), ("π", "")],
)
def test_unknown_names_get_a_suggestion(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="did you mean") as caught:
        recipe(name)
    assert repr(name) in str(caught.value)
    assert f"did you mean '{nearest}" in str(caught.value)
    for known in recipe_names():
        assert known in str(caught.value)
