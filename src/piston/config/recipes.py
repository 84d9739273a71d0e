"""Recipes: a name → one complete RunConfig. Names and values are openpi's where openpi has the recipe.

Every value not written here is a default of schema.py, and those are openpi's defaults (openpi training/config.py). A
recipe is a function, so a variant is two lines: call another recipe and `dataclasses.replace` what differs. ORIGINS
says what openpi's configuration has and a RunConfig has no field for. A recipe of your own is a Python file: `recipe`.
"""

import dataclasses
import difflib
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from piston.config.robots import (
    ALOHA,
    ALOHA_SIM,
    DROID,
    DROID_JOINT_POSITION,
    LIBERO,
    LIBERO_EXTRA_DELTA,
    PLANAR_ARM,
)
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


def _aloha(name: str, *, pi05: bool = False, prompt: str | None = None) -> RunConfig:
    data = _data(ALOHA, "trossen", pi05=pi05, prompt_from_task=False, default_prompt=prompt)
    return RunConfig(name=name, model=PI05 if pi05 else PI0, data=data)


def pi0_aloha() -> RunConfig:
    """The base π0 on a real ALOHA; openpi only serves it."""
    return _aloha("pi0_aloha")


def pi05_aloha() -> RunConfig:
    """The base π0.5 on a real ALOHA; openpi only serves it."""
    return _aloha("pi05_aloha", pi05=True)


def pi0_aloha_towel() -> RunConfig:
    """π0 that folds towels; openpi only serves it."""
    return _aloha("pi0_aloha_towel", prompt="fold the towel")


def pi0_aloha_tupperware() -> RunConfig:
    """π0 that opens a tupperware; openpi only serves it."""
    return _aloha("pi0_aloha_tupperware", prompt="open the tupperware and put the food on the plate")


def pi0_droid() -> RunConfig:
    """π0 on DROID, joint velocities; openpi only serves it."""
    return RunConfig(
        name="pi0_droid",
        model=dataclasses.replace(PI0, action_horizon=10),
        data=_data(DROID, "droid", pi05=False),
    )


def pi05_droid() -> RunConfig:
    """π0.5 on DROID, joint velocities; openpi only serves it."""
    return RunConfig(
        name="pi05_droid",
        model=dataclasses.replace(PI05, action_horizon=15),
        data=_data(DROID, "droid", pi05=True),
    )


def paligemma_diffusion_droid() -> RunConfig:
    """π0 with eight action dimensions, trained on DROID from PaliGemma; openpi only serves it."""
    return RunConfig(
        name="paligemma_diffusion_droid",
        model=dataclasses.replace(PI0, action_horizon=10, action_dim=8),
        data=_data(DROID, "droid", pi05=False),
    )


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
        data=_data(DROID, "your_hf_username/my_droid_dataset", pi05=True),
        train=TrainConfig(num_train_steps=20_000),
    )


def pi05_full_droid_finetune() -> RunConfig:
    """π0.5 on all of DROID, with absolute joint positions that become relative."""
    return RunConfig(
        name="pi05_full_droid_finetune",
        model=dataclasses.replace(PI05, action_horizon=16),
        data=_data(DROID_JOINT_POSITION, "droid", pi05=True),
        optim=_constant(1000, 5e-5),
        train=TrainConfig(batch_size=256, num_train_steps=100_000, save_interval=5000, keep_period=10_000),
    )


def _polaris(name: str, model: ModelConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=_data(DROID_JOINT_POSITION, "droid", pi05=model.pi05),
        optim=_constant(1000, 5e-5),
        train=TrainConfig(batch_size=128, num_train_steps=1000, keep_period=1000),
    )


def pi05_droid_jointpos_polaris() -> RunConfig:
    """π0.5 on DROID and PolaRiS' simulated demonstrations."""
    return _polaris("pi05_droid_jointpos_polaris", dataclasses.replace(PI05, action_horizon=15))


def pi0_droid_jointpos_polaris() -> RunConfig:
    """π0 on DROID and PolaRiS' simulated demonstrations."""
    return _polaris("pi0_droid_jointpos_polaris", dataclasses.replace(PI0, action_horizon=10, max_token_len=100))


def pi0_droid_jointpos_100k_polaris() -> RunConfig:
    """As pi0_droid_jointpos_polaris, from another checkpoint."""
    return _polaris("pi0_droid_jointpos_100k_polaris", dataclasses.replace(PI0, action_horizon=10, max_token_len=100))


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


def debug_restore() -> RunConfig:
    """openpi's `debug_restore`: starts from the last checkpoint of `debug`."""
    return RunConfig(
        name="debug_restore",
        model=_dummy(PI0),
        data=_planar_arm(pi05=False),
        train=TrainConfig(
            exp_name="debug",
            batch_size=2,
            num_train_steps=10,
            overwrite=True,
            init=Path("checkpoints/debug/debug/10"),
        ),
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


@dataclass(frozen=True)
class Origin:
    """What openpi's configuration of the same name has besides.

    `start`: the weights it starts from, given with --train.init here. `stats`: the statistics it takes from a
    checkpoint instead of computing them, given with --data.norm-stats. `differs`: what Piston does not do the same way.
    """

    start: str | None = None
    stats: str | None = None
    differs: str = ""


CHECKPOINTS = "gs://openpi-assets/checkpoints"
SERVED = "openpi only serves it, and has no data set for it"
RLDS = (
    "openpi reads RLDS, Piston a LeRobot copy of it; openpi's frame filter, and its random choice of exterior camera "
    "and of instruction, are left to whoever makes the copy"
)
DEMO_DATA = (
    "openpi's 27-layer vision tower and vocabulary are shrunk, and its random numbers replaced by the demo data set"
)


def _from_base(base: str, asset: str | None = None, differs: str = "") -> Origin:
    stats = None if asset is None else f"{CHECKPOINTS}/{base}/assets/{asset}"
    return Origin(f"{CHECKPOINTS}/{base}/params", stats, differs)


def _from_polaris(name: str) -> Origin:
    mixed = f"openpi mixes DROID (0.9) and PolaRiS' demonstrations (0.1), Piston reads one data set; {RLDS}"
    return _from_base(f"polaris/{name}", "droid", mixed)


ORIGINS: dict[str, Origin] = {
    "pi0_aloha": Origin(differs=SERVED),
    "pi05_aloha": Origin(differs=SERVED),
    "pi0_aloha_towel": Origin(differs=SERVED),
    "pi0_aloha_tupperware": Origin(differs=SERVED),
    "pi0_droid": Origin(differs=SERVED),
    "pi05_droid": Origin(differs=SERVED),
    "paligemma_diffusion_droid": Origin(differs=f"{SERVED}; there, its transforms fail to build"),
    "pi0_libero": _from_base("pi0_base"),
    "pi0_libero_low_mem_finetune": _from_base("pi0_base"),
    "pi05_libero": _from_base("pi05_base"),
    "pi0_aloha_pen_uncap": _from_base("pi0_base", "trossen"),
    "pi05_aloha_pen_uncap": _from_base("pi05_base", "trossen"),
    "pi0_aloha_sim": _from_base("pi0_base"),
    "pi05_droid_finetune": _from_base("pi05_droid", "droid"),
    "pi05_full_droid_finetune": _from_base("pi05_base", "droid", RLDS),
    "pi05_droid_jointpos_polaris": _from_polaris("pi05_droid_jointpos_polaris"),
    "pi0_droid_jointpos_polaris": _from_polaris("pi0_droid_jointpos_polaris"),
    "pi0_droid_jointpos_100k_polaris": _from_polaris("pi0_droid_jointpos_100k_polaris"),
    "debug": Origin(differs=DEMO_DATA),
    "debug_restore": Origin("./checkpoints/debug/debug/9/params", differs=f"{DEMO_DATA}; steps are counted from one"),
    "debug_pi05": Origin(differs=DEMO_DATA),
}

RECIPES: dict[str, Callable[[], RunConfig]] = {
    make.__name__: make
    for make in (
        pi0_aloha,
        pi05_aloha,
        pi0_aloha_towel,
        pi0_aloha_tupperware,
        pi0_droid,
        pi05_droid,
        paligemma_diffusion_droid,
        pi0_libero,
        pi0_libero_low_mem_finetune,
        pi05_libero,
        pi0_aloha_pen_uncap,
        pi05_aloha_pen_uncap,
        pi0_aloha_sim,
        pi05_droid_finetune,
        pi05_full_droid_finetune,
        pi05_droid_jointpos_polaris,
        pi0_droid_jointpos_polaris,
        pi0_droid_jointpos_100k_polaris,
        debug,
        debug_restore,
        debug_pi05,
        debug_cpu,
        demo,
    )
}


def recipe_names() -> tuple[str, ...]:
    """All recipes, in the order in which they are defined."""
    return tuple(RECIPES)


def recipe(name: str) -> RunConfig:
    """The named recipe's RunConfig, or that of a Python file (a path that ends with .py) which sets RECIPE to one.

    The file is run: it is code. Raises ValueError, suggesting the nearest name, if there is no such recipe, and for a
    file without one.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name.lower(), RECIPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown recipe {name!r}; did you mean {nearest!r}? Recipes are {', '.join(RECIPES)}; "
            "for one of your own give the path of a Python file that sets RECIPE (docs/new-robot.md)"
        )
    return RECIPES[name]()


def _from_file(path: Path) -> RunConfig:
    if not path.is_file():
        raise ValueError(
            f"there is no recipe file {path}; expected a Python file that sets RECIPE to a RunConfig "
            "(docs/new-robot.md): check the path"
        )
    found = runpy.run_path(str(path)).get("RECIPE")
    if not isinstance(found, RunConfig):
        raise ValueError(
            f"{path} sets RECIPE to {'nothing' if found is None else type(found).__name__}, expected a RunConfig: "
            "end it with RECIPE = RunConfig(…) (docs/new-robot.md)"
        )
    return found
