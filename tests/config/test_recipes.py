"""Recipes resolve to openpi's values, field by field; unknown names get a suggestion."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from piston.config.recipes import DEMO_ROOT, ORIGINS, SHIPPED_VOCAB_SIZE, recipe, recipe_names
from piston.config.robots import ALOHA, ALOHA_SIM, DROID, DROID_JOINT_POSITION, LIBERO, LIBERO_EXTRA_DELTA, PLANAR_ARM
from piston.config.schema import (
    CAMERAS,
    GEMMA_VARIANTS,
    PALIGEMMA_VOCAB_SIZE,
    SHIPPED_TOKENIZER,
    SO400M,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RobotConfig,
    RunConfig,
    TrainConfig,
)
from piston.config.serialize import from_json, leaves, to_json

DEFAULT = (1000, 2.5e-5, 30_000, 2.5e-6)
CONSTANT = (1000, 5e-5, 1_000_000, 5e-5)  # after the warm-up
LIBERO_SET, PEN = "physical-intelligence/libero", "physical-intelligence/aloha_pen_uncap_diverse"
TUPPERWARE = "open the tupperware and put the food on the plate"
PI0, PI05, POLARIS = "pi0_base", "pi05_base", "polaris/{}"


@dataclasses.dataclass(frozen=True)
class Row:
    """openpi's values of one configuration; the defaults are openpi's own."""

    pi05: bool
    horizon: int
    robot: RobotConfig
    repo_id: str
    prompt_from_task: bool = True
    prompt: str | None = None
    batch: int = 32
    steps: int = 30_000
    schedule: tuple[int, float, int, float] = DEFAULT
    ema: float | None = 0.99
    start: str | None = None
    asset: str | None = None  # whose statistics it takes from the checkpoint it starts from
    save_interval: int = 1000
    keep_period: int = 5000
    state_in_prompt: bool | None = None  # None: as pi05
    action_dim: int = 32
    tokens: int | None = None  # None: 48 for π0, 200 for π0.5


def _aloha(pi05: bool, prompt: str | None) -> Row:
    return Row(pi05, 50, ALOHA, "trossen", prompt_from_task=False, prompt=prompt)


def _polaris(name: str, pi05: bool, horizon: int, tokens: int) -> Row:
    return Row(
        pi05, horizon, DROID_JOINT_POSITION, "droid", batch=128, steps=1000, schedule=CONSTANT,
        start=POLARIS.format(name), asset="droid", keep_period=1000, tokens=tokens,
    )  # fmt: skip


OPENPI = {
    "pi0_aloha": _aloha(False, None),
    "pi0_aloha_towel": _aloha(False, "fold the towel"),
    "pi0_aloha_tupperware": _aloha(False, TUPPERWARE),
    "pi05_aloha": _aloha(True, None),
    "pi0_droid": Row(False, 10, DROID, "droid"),
    "pi05_droid": Row(True, 15, DROID, "droid"),
    "paligemma_diffusion_droid": Row(False, 10, DROID, "droid", action_dim=8),
    "pi0_libero": Row(False, 50, LIBERO_EXTRA_DELTA, LIBERO_SET, start=PI0),
    "pi0_libero_low_mem_finetune": Row(False, 50, LIBERO_EXTRA_DELTA, LIBERO_SET, ema=None, start=PI0),
    "pi05_libero": Row(
        True, 10, LIBERO, LIBERO_SET, batch=256, schedule=(10_000, 5e-5, 1_000_000, 5e-5), ema=0.999, start=PI05,
        state_in_prompt=False,
    ),
    "pi0_aloha_pen_uncap": Row(
        False, 50, ALOHA, PEN, prompt_from_task=False, prompt="uncap the pen", steps=20_000, start=PI0, asset="trossen"
    ),
    "pi05_aloha_pen_uncap": Row(
        True, 50, ALOHA, PEN, prompt_from_task=False, prompt="uncap the pen", batch=64, steps=20_000, start=PI05,
        asset="trossen",
    ),
    "pi05_full_droid_finetune": Row(
        True, 16, DROID_JOINT_POSITION, "droid", batch=256, steps=100_000, schedule=CONSTANT, start=PI05, asset="droid",
        save_interval=5000, keep_period=10_000,
    ),
    "pi05_droid_finetune": Row(
        True, 16, DROID, "your_hf_username/my_droid_dataset", steps=20_000, start="pi05_droid", asset="droid"
    ),
    "pi0_aloha_sim": Row(
        False, 50, ALOHA_SIM, "lerobot/aloha_sim_transfer_cube_human", prompt_from_task=False, prompt="Transfer cube",
        steps=20_000, start=PI0,
    ),
    "pi05_droid_jointpos_polaris": _polaris("pi05_droid_jointpos_polaris", True, 15, 200),
    "pi0_droid_jointpos_polaris": _polaris("pi0_droid_jointpos_polaris", False, 10, 100),
    "pi0_droid_jointpos_100k_polaris": _polaris("pi0_droid_jointpos_100k_polaris", False, 10, 100),
}  # fmt: skip
DEBUG = ("debug", "debug_restore", "debug_pi05")


@pytest.mark.parametrize("name", OPENPI)
def test_values_are_openpis(name: str) -> None:
    """Every field of a RunConfig, so that a new field must be thought about here."""
    row = OPENPI[name]
    lora = "_lora" if "low_mem" in name else ""
    expected = RunConfig(
        name=name,
        model=ModelConfig(
            pi05=row.pi05,
            dtype="bfloat16",
            paligemma=GEMMA_VARIANTS[f"gemma_2b{lora}"],
            action_expert=GEMMA_VARIANTS[f"gemma_300m{lora}"],
            siglip=SO400M,
            vocab_size=PALIGEMMA_VOCAB_SIZE,
            image_size=(224, 224),
            cameras=CAMERAS,
            action_dim=row.action_dim,
            action_horizon=row.horizon,
            max_token_len=row.tokens or (200 if row.pi05 else 48),
            discrete_state_input=row.pi05 if row.state_in_prompt is None else row.state_in_prompt,
        ),
        data=DataConfig(
            root=None,
            repo_id=row.repo_id,
            robot=row.robot,
            prompt_from_task=row.prompt_from_task,
            default_prompt=row.prompt,
            use_quantile_norm=row.pi05,
            norm_stats=None,
            tokenizer=None,  # a pretrained model's tokenizer is the user's to give
            augment=True,
            num_workers=2,
        ),
        optim=OptimConfig(
            "cosine", *row.schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-10, clip_gradient_norm=1.0,
            ema_decay=row.ema,
        ),
        train=TrainConfig(
            batch_size=row.batch, num_train_steps=row.steps, seed=42, log_interval=100,
            save_interval=row.save_interval, keep_period=row.keep_period, resume=False, overwrite=False,
        ),
    )  # fmt: skip
    ours, openpis = leaves(recipe(name)), leaves(expected)
    assert {key: (ours.get(key), openpis.get(key)) for key in ours | openpis if ours.get(key) != openpis.get(key)} == {}
    base, origin = f"gs://openpi-assets/checkpoints/{row.start}", ORIGINS[name]
    assert origin.start == (None if row.start is None else f"{base}/params")
    assert origin.stats == (None if row.asset is None else f"{base}/assets/{row.asset}")


def test_no_configuration_of_openpi_is_missing() -> None:
    assert set(ORIGINS) == {*OPENPI, *DEBUG}
    assert set(recipe_names()) == {*ORIGINS, "debug_cpu", "demo"}
    for name, origin in ORIGINS.items():  # what openpi reads and Piston does not is said
        recorded = OPENPI[name].start if name in OPENPI else None
        rlds = name in OPENPI and OPENPI[name].robot == DROID_JOINT_POSITION
        assert ("RLDS" in origin.differs) == rlds, name
        assert ("only serves" in origin.differs) == (name in OPENPI and recorded is None), name


# --- openpi's own code, where its venv is ----------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
LIVE = ROOT / ".venv-live" / "bin" / "python"
COLUMNS = {  # where openpi's policies put a repacked image
    "observation/image": "base_0_rgb", "observation/wrist_image": "left_wrist_0_rgb",
    "observation/exterior_image_1_left": "base_0_rgb", "observation/wrist_image_left": "left_wrist_0_rgb",
    "images/cam_high": "base_0_rgb", "images/cam_left_wrist": "left_wrist_0_rgb",
    "images/cam_right_wrist": "right_wrist_0_rgb",
}  # fmt: skip


@pytest.fixture(scope="session")
def openpi() -> dict[str, Any]:
    """Every π0 and π0.5 configuration of the installed openpi, resolved by its own code."""
    if not LIVE.exists():
        pytest.skip("openpi's venv is not there (make live)")
    script = ROOT / "scripts" / "openpi_live" / "configs.py"
    done = subprocess.run([LIVE, script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_installed_openpi_has_no_other_configurations(openpi: dict[str, Any]) -> None:
    assert set(openpi) <= set(ORIGINS)
    assert {name for name in ORIGINS if name not in openpi} == {name for name in OPENPI if name.endswith("_polaris")}


@pytest.mark.parametrize("name", [name for name in (*OPENPI, *DEBUG) if not name.endswith("_polaris")])
def test_values_are_those_of_openpis_code(openpi: dict[str, Any], name: str) -> None:
    theirs, run = openpi[name], recipe(name)
    model, data, optim, train = run.model, run.data, run.optim, run.train
    assert theirs["model"] == {
        "dtype": model.dtype, "pi05": model.pi05, "action_dim": model.action_dim,
        "action_horizon": model.action_horizon, "max_token_len": model.max_token_len,
        "discrete_state_input": model.discrete_state_input,
        "frozen": "by rule" if model.paligemma.lora_attn else "nothing",
        "paligemma_variant": _variant(model.paligemma), "action_expert_variant": _variant(model.action_expert),
    }  # fmt: skip
    schedule = {f: getattr(optim, f) for f in ("warmup_steps", "peak_lr", "decay_steps", "decay_lr")}
    assert theirs["schedule"] == {"kind": "CosineDecaySchedule", **schedule}
    adamw = {f: getattr(optim, f) for f in ("b1", "b2", "eps", "weight_decay", "clip_gradient_norm")}
    assert theirs["optimizer"] == {"kind": "AdamW", **adamw}
    settings = {**theirs["train"]}
    assert settings.pop("ema_decay") == optim.ema_decay
    rlds = theirs["data"].get("kind") == "RLDSDroidDataConfig"
    assert settings.pop("num_workers") == (0 if rlds else data.num_workers)
    if settings["exp_name"] == "<missing>":
        del settings["exp_name"]
    assert settings == {field: getattr(train, field) for field in settings}
    assert theirs["start"] == ORIGINS[name].start
    assets = theirs["data"]["assets_dir"]
    stats = None if assets is None else f"{assets.rstrip('/')}/{theirs['data']['asset_id']}"
    assert stats == ORIGINS[name].stats
    if name not in (*DEBUG, "paligemma_diffusion_droid"):
        _compare_data(theirs["data"], data, rlds=rlds)


def _variant(sizes: object) -> str:
    return next(name for name, known in GEMMA_VARIANTS.items() if known == sizes)


def _compare_data(theirs: dict[str, Any], data: DataConfig, *, rlds: bool) -> None:
    robot = data.robot
    assert data.repo_id == (theirs["repo_id"] or theirs["asset_id"])
    assert data.use_quantile_norm == theirs["use_quantile_norm"]
    assert data.default_prompt == theirs["default_prompt"]
    assert rlds or data.prompt_from_task == theirs["prompt_from_task"]
    mask = [positive for n in robot.delta_mask for positive in [n > 0] * abs(n)]
    assert theirs["delta_masks"] == ([mask] if mask else [])
    assert theirs["adapt_to_pi"] == ([robot.adapt_to_pi] if theirs["kind"] == "LeRobotAlohaDataConfig" else [])
    if theirs["kind"] != "SimpleDataConfig" and not rlds:
        assert theirs["action_keys"] == [robot.action_key]
    if theirs["repo_id"] and not rlds:  # the others are only served, from whatever cameras a client has
        cameras = {COLUMNS[key]: column for key, column in theirs["columns"].items() if key in COLUMNS}
        assert robot.cameras == cameras


# --- recipes of Piston's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pi05"), [("debug", False), ("debug_restore", False), ("debug_pi05", True)])
def test_debug_recipes_are_openpis_but_for_vision_vocabulary_and_data(name: str, pi05: bool) -> None:
    run = recipe(name)
    dummy = GEMMA_VARIANTS["dummy"]
    assert (run.model.paligemma, run.model.action_expert) == (dummy, dummy)
    assert (run.model.pi05, run.model.discrete_state_input) == (pi05, pi05)
    assert (run.model.action_horizon, run.model.action_dim) == (50, 32)
    assert (run.train.batch_size, run.train.num_train_steps, run.train.overwrite) == (2, 10, True)
    assert run.train.exp_name == name.removesuffix("_restore")
    assert run.train.init == (Path("checkpoints/debug/debug/10") if name == "debug_restore" else None)
    assert run.optim == recipe("pi0_libero").optim


@pytest.mark.parametrize("name", ["debug", "debug_restore", "debug_pi05", "debug_cpu", "demo"])
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


MINE = """
import dataclasses
from piston.config.recipes import recipe
RECIPE = dataclasses.replace(recipe("debug_cpu"), name="mine")
"""


def test_a_file_is_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert recipe(str(file)) == dataclasses.replace(recipe("debug_cpu"), name="mine")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no recipe file"), ("", "to nothing"), ("RECIPE = 3", "to int, expected")]
)
def test_files_without_a_recipe_are_explained(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        recipe(str(file))
