"""Recipes: a name → one complete RunConfig. Names and values are openpi's where openpi has the recipe.

Every value not written here is a default of schema.py, and those are openpi's defaults (openpi training/config.py). A
recipe is a function, so a variant is two lines: call another recipe and `dataclasses.replace` what differs.
"""

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path

from piston.config.robots import ALOHA, ALOHA_SIM, DROID, LIBERO, LIBERO_EXTRA_DELTA, PLANAR_ARM
from piston.config.schema import (
    GEMMA_VARIANTS,
    SHIPPED_TOKENIZER,
    DataConfig,
    GemmaConfig,
    ModelConfig,
    OptimConfig,
    RobotConfig,
    RunConfig,
    SiglipConfig,
    TrainConfig,
)

SHIPPED_VOCAB_SIZE = 1024  # of the tokenizer in assets/, which scripts/make_tokenizer.py makes
DEMO_ROOT = Path("demo/data")  # where `piston data demo` writes, and the demo and debug recipes read

# openpi's `dummy` shrinks both Gemmas but keeps the 27-layer SigLIP and PaliGemma's vocabulary: 429 M parameters.
# Ours shrinks those too, so that the debug recipes run on a laptop with the shipped tokenizer.
TINY_SIGLIP = SiglipConfig(width=64, depth=2, mlp_dim=128, num_heads=2)

PI0 = ModelConfig(pi05=False, max_token_len=48)
PI05 = ModelConfig(pi05=True, max_token_len=200, discrete_state_input=True)


def _data(robot: RobotConfig, repo_id: str, *, pi05: bool, **changes: object) -> DataConfig:
    """Quantile normalisation for π0.5, z-score for π0, whatever the data set (openpi training/config.py:187)."""
    return dataclasses.replace(DataConfig(robot=robot, repo_id=repo_id, use_quantile_norm=pi05), **changes)


def _constant(warmup_steps: int, lr: float) -> OptimConfig:
    """openpi's way to say "constant after the warm-up": a cosine between equal rates."""
    return OptimConfig(warmup_steps=warmup_steps, peak_lr=lr, decay_steps=1_000_000, decay_lr=lr)


def pi0_libero() -> RunConfig:
    """π0 on LIBERO; the state is subtracted from actions that are deltas already, as in openpi's checkpoint."""
    return RunConfig(
        name="pi0_libero",
        model=PI0,
        data=_data(LIBERO_EXTRA_DELTA, "physical-intelligence/libero", pi05=False),
    )


def pi0_libero_low_mem_finetune() -> RunConfig:
    """π0 on LIBERO with LoRA on both experts; everything else of them is frozen, and there is no EMA."""
    run = pi0_libero()
    vlm, expert = GEMMA_VARIANTS["gemma_2b_lora"], GEMMA_VARIANTS["gemma_300m_lora"]
    return dataclasses.replace(
        run,
        name="pi0_libero_low_mem_finetune",
        model=dataclasses.replace(run.model, paligemma=vlm, action_expert=expert),
        optim=OptimConfig(ema_decay=None),
    )


def pi05_libero() -> RunConfig:
    """π0.5 on LIBERO. No state reaches the model: π0.5 has no state token, and the prompt leaves it out here."""
    return RunConfig(
        name="pi05_libero",
        model=dataclasses.replace(PI05, action_horizon=10, discrete_state_input=False),
        data=_data(LIBERO, "physical-intelligence/libero", pi05=True),
        optim=dataclasses.replace(_constant(10_000, 5e-5), ema_decay=0.999),
        train=TrainConfig(batch_size=256),
    )


def _pen_uncap(*, pi05: bool) -> DataConfig:
    """openpi normalises this data set with its base model's statistics, asset "trossen" of the base checkpoint."""
    return _data(
        ALOHA,
        "physical-intelligence/aloha_pen_uncap_diverse",
        pi05=pi05,
        prompt_from_task=False,
        default_prompt="uncap the pen",
    )


def pi0_aloha_pen_uncap() -> RunConfig:
    """π0 on a real ALOHA with three cameras."""
    return RunConfig(
        name="pi0_aloha_pen_uncap",
        model=PI0,
        data=_pen_uncap(pi05=False),
        train=TrainConfig(num_train_steps=20_000),
    )


def pi05_aloha_pen_uncap() -> RunConfig:
    """π0.5 on a real ALOHA with three cameras."""
    return RunConfig(
        name="pi05_aloha_pen_uncap",
        model=PI05,
        data=_pen_uncap(pi05=True),
        train=TrainConfig(batch_size=64, num_train_steps=20_000),
    )


def pi0_aloha_sim() -> RunConfig:
    """π0 on gym-aloha's transfer-cube demonstrations: one camera, absolute actions."""
    return RunConfig(
        name="pi0_aloha_sim",
        model=PI0,
        data=_data(
            ALOHA_SIM,
            "lerobot/aloha_sim_transfer_cube_human",
            pi05=False,
            prompt_from_task=False,
            default_prompt="Transfer cube",
        ),
        train=TrainConfig(num_train_steps=20_000),
    )


def pi05_droid_finetune() -> RunConfig:
    """π0.5 on a DROID-like data set of your own in LeRobot format.

    openpi keeps the statistics of the checkpoint it starts from (asset "droid" of pi05_droid) when it fine-tunes.
    """
    return RunConfig(
        name="pi05_droid_finetune",
        model=dataclasses.replace(PI05, action_horizon=16),
        data=_data(DROID, "my_droid_dataset", pi05=True),
        train=TrainConfig(num_train_steps=20_000),
    )


def _planar_arm(*, pi05: bool, **changes: object) -> DataConfig:
    return _data(PLANAR_ARM, "planar_arm", pi05=pi05, root=DEMO_ROOT, tokenizer=SHIPPED_TOKENIZER, **changes)


def _dummy(model: ModelConfig) -> ModelConfig:
    gemma = GEMMA_VARIANTS["dummy"]
    return dataclasses.replace(
        model, paligemma=gemma, action_expert=gemma, siglip=TINY_SIGLIP, vocab_size=SHIPPED_VOCAB_SIZE
    )


def debug() -> RunConfig:
    """openpi's `debug` (dummy π0, ten steps of two samples), on the demo data set instead of random numbers."""
    return RunConfig(
        name="debug",
        model=_dummy(PI0),
        data=_planar_arm(pi05=False),
        train=TrainConfig(exp_name="debug", batch_size=2, num_train_steps=10, save_interval=100, overwrite=True),
    )


def debug_pi05() -> RunConfig:
    """openpi's `debug_pi05` (dummy π0.5, ten steps of two samples), on the demo data set instead of random numbers."""
    return RunConfig(
        name="debug_pi05",
        model=_dummy(PI05),
        data=_planar_arm(pi05=True),
        train=TrainConfig(exp_name="debug_pi05", batch_size=2, num_train_steps=10, overwrite=True),
    )


def debug_cpu() -> RunConfig:
    """Twenty float32 steps of the smallest π0.5 in seconds on a laptop: for bit-exact comparisons of two commits."""
    gemma = GemmaConfig(width=32, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
    return RunConfig(
        name="debug_cpu",
        model=ModelConfig(
            pi05=True,
            dtype="float32",
            paligemma=gemma,
            action_expert=gemma,
            siglip=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=2),
            vocab_size=SHIPPED_VOCAB_SIZE,
            image_size=(56, 56),
            action_dim=8,
            action_horizon=8,
            max_token_len=32,
            discrete_state_input=True,
        ),
        data=_planar_arm(pi05=True, num_workers=0),
        optim=OptimConfig(warmup_steps=5, peak_lr=1e-3, decay_steps=20, decay_lr=1e-4),
        train=TrainConfig(
            exp_name="debug_cpu", batch_size=8, num_train_steps=20, log_interval=1, overwrite=True, device="cpu"
        ),
    )


def demo() -> RunConfig:
    """A small π0.5 from scratch on the planar arm: what `make demo` trains on two CPU cores.

    No state reaches the model, as in pi05_libero. Four image tokens per camera are enough for three blocks.
    """
    gemma = GemmaConfig(width=128, depth=2, mlp_dim=256, num_heads=8, num_kv_heads=1, head_dim=16)
    return RunConfig(
        name="demo",
        model=ModelConfig(
            pi05=True,
            dtype="float32",
            paligemma=gemma,
            action_expert=gemma,
            siglip=SiglipConfig(width=96, depth=1, mlp_dim=192, num_heads=4),
            vocab_size=SHIPPED_VOCAB_SIZE,
            image_size=(28, 28),
            action_dim=8,
            action_horizon=5,
            max_token_len=8,
            discrete_state_input=False,
        ),
        data=_planar_arm(pi05=True, num_workers=1),
        optim=OptimConfig(warmup_steps=50, peak_lr=2e-3, decay_steps=2_000, decay_lr=1e-4),
        train=TrainConfig(
            exp_name="demo",
            batch_size=128,
            num_train_steps=2_000,
            log_interval=50,
            save_interval=500,
            device="cpu",
            threads=1,  # a model this small only waits for a second thread, and the loader needs that core
        ),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    make.__name__: make
    for make in (
        pi0_libero,
        pi0_libero_low_mem_finetune,
        pi05_libero,
        pi0_aloha_pen_uncap,
        pi05_aloha_pen_uncap,
        pi0_aloha_sim,
        pi05_droid_finetune,
        debug,
        debug_pi05,
        debug_cpu,
        demo,
    )
}


def recipe_names() -> tuple[str, ...]:
    """All recipes, in the order in which they are defined."""
    return tuple(RECIPES)


def recipe(name: str) -> RunConfig:
    """The named recipe's RunConfig. Raises ValueError, suggesting the nearest name, if there is none."""
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name.lower(), RECIPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown recipe {name!r}; did you mean {nearest!r}? Recipes are {', '.join(RECIPES)}; "
            "add your own to piston/config/recipes.py"
        )
    return RECIPES[name]()
