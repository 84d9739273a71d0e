"""Configurations of openpi and LeRobot become recipes; none of their code runs, and nothing is dropped in silence."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from piston.config.recipes import ORIGINS, recipe
from piston.config.robots import ALOHA
from piston.config.schema import GEMMA_VARIANTS
from piston.convert.migrate import Migrated, migrate, migrate_command, source_of

MINE = """
import pathlib
pathlib.Path("ran").touch()  # must never run

STEPS = 12_345

class LeRobotMyArmDataConfig(DataConfigFactory):
    def create(self, assets_dirs, model_config):
        repack = _transforms.Group(inputs=[_transforms.RepackTransform({
            "observation/image": "top", "observation/wrist_image": "hand", "observation/state": "joints",
            "actions": "command", "prompt": "prompt"})])
        mask = _transforms.make_bool_mask(5, -1)
        return None

_CONFIGS = [
    TrainConfig(
        name="arm",
        model=pi0_config.Pi0Config(pi05=True, action_horizon=12, paligemma_variant="gemma_2b_lora"),
        data=LeRobotMyArmDataConfig(repo_id="me/arm", base_config=DataConfig(prompt_from_task=True)),
        weight_loader=weight_loaders.CheckpointWeightLoader("/weights/pi05_base/params"),
        lr_schedule=_optimizer.CosineDecaySchedule(warmup_steps=500, peak_lr=3e-5, decay_steps=9_000, decay_lr=1e-6),
        optimizer=_optimizer.AdamW(weight_decay=1e-4),
        num_train_steps=STEPS,
        batch_size=2 ** 6,
        ema_decay=None,
        wandb_enabled=False,
        fsdp_devices=4,
        strange=something(3),
    ),
    TrainConfig(name="fast", model=pi0_fast.Pi0FASTConfig(action_dim=7)),
]
"""


def written(tmp_path: Path, text: str, name: str = "config.py") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def read_back(migrated: Migrated, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(source_of(migrated, "config.py"))
    assert recipe(str(tmp_path / "recipe.py")) == migrated.run


def test_a_configuration_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    migrated = migrate(written(tmp_path, MINE), "arm")
    run, notes = migrated.run, "\n".join(migrated.notes)
    assert not Path("ran").exists()
    assert (run.model.pi05, run.model.action_horizon, run.model.max_token_len) == (True, 12, 200)
    assert run.model.discrete_state_input
    assert run.model.paligemma == GEMMA_VARIANTS["gemma_2b_lora"]
    robot = run.data.robot
    assert robot.cameras == {"base_0_rgb": "top", "left_wrist_0_rgb": "hand"}
    assert (robot.state_keys, robot.action_key, robot.delta_mask) == (("joints",), "command", (5, -1))
    assert (robot.state_dim, robot.action_dim) == (6, 6)
    assert (run.data.repo_id, run.data.prompt_from_task, run.data.use_quantile_norm) == ("me/arm", True, True)
    optim = run.optim
    assert (optim.warmup_steps, optim.peak_lr, optim.decay_steps, optim.decay_lr) == (500, 3e-5, 9000, 1e-6)
    assert (optim.weight_decay, optim.ema_decay, optim.clip_gradient_norm) == (1e-4, None, 1.0)
    assert (run.train.num_train_steps, run.train.init) == (12_345, Path("/weights/pi05_base/params"))
    for said in ("batch_size is 2 ** 6", "fsdp_devices=4", "strange=something(3)", "check cameras", "with LoRA"):
        assert said in notes
    read_back(migrated, tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (MINE, None, "none is chosen; expected one of arm, fast"),
        (MINE, "leg", "none is 'leg'"),
        (MINE, "fast", "expected Pi0Config"),
        ("x = 1", None, "has 0 configurations"),
        ("def (", None, "is not Python"),
    ],
)
def test_what_cannot_be_read_is_explained(tmp_path: Path, text: str, name: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        migrate(written(tmp_path, text), name)
    with pytest.raises(ValueError, match="expected openpi's configuration"):
        migrate(tmp_path / "config.yaml")


OPENPI = next(Path(__file__).parents[2].glob(".venv-live/lib/python3*/site-packages/openpi/training/config.py"), None)


@pytest.mark.skipif(OPENPI is None, reason="openpi's venv is not there (make live)")
@pytest.mark.parametrize("name", [n for n in ORIGINS if not n.endswith("_polaris") and "paligemma" not in n])
def test_openpis_own_are_our_recipes(tmp_path: Path, name: str) -> None:
    """All of openpi's configuration file, and the recipes of the same names."""
    assert OPENPI is not None
    migrated, expected = migrate(OPENPI, name), recipe(name)
    run, origin = migrated.run, ORIGINS[name]
    read_back(migrated, tmp_path)
    if name.startswith("debug"):  # ours have a smaller vision tower and other data
        assert (run.model.paligemma, run.train.num_train_steps) == (expected.model.paligemma, 10)
        assert run.optim == expected.optim
        return
    if run.data.robot.cameras == {"base_0_rgb": "observation.images.top"}:  # openpi only serves them, from any camera
        assert "aloha" in name
        run = replace(run, data=replace(run.data, robot=replace(run.data.robot, name="aloha", cameras=ALOHA.cameras)))
        expected = replace(expected, data=replace(expected.data, robot=run.data.robot))
        assert run.data.robot.delta_mask == (() if "sim" in name else ALOHA.delta_mask)
    assert run == expected
    notes = "\n".join(migrated.notes)
    assert (origin.start or "") in notes
    assert (origin.stats or "") in notes
    assert ("RLDS" in notes) == ("RLDS" in origin.differs)


LEROBOT: dict[str, Any] = {
    "dataset": {"repo_id": "me/arm", "root": None},
    "policy": {
        "type": "pi05", "chunk_size": 20, "dtype": "bfloat16", "max_action_dim": 32, "train_expert_only": True,
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, 224, 224]},
            "observation.images.hand": {"type": "VISUAL", "shape": [3, 224, 224]},
            "observation.state": {"type": "STATE", "shape": [6]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [6]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        "use_relative_actions": True, "relative_exclude_joints": ["gripper"],
        "action_feature_names": ["a.pos", "b.pos", "c.pos", "d.pos", "e.pos", "gripper.pos"],
        "pretrained_path": "lerobot/pi05_base", "optimizer_lr": 2.5e-5, "scheduler_warmup_steps": 1000,
        "scheduler_decay_steps": 30000, "scheduler_decay_lr": 2.5e-6,
    },
    "steps": 3000, "batch_size": 8, "seed": 1000, "num_workers": 4, "log_freq": 200, "save_freq": 1500,
    "output_dir": "outputs/train/arm", "job_name": "arm_pi05",
    "optimizer": {"type": "adamw", "lr": 2.5e-5, "weight_decay": 0.01, "grad_clip_norm": 1.0, "betas": [0.9, 0.95]},
}  # fmt: skip


def test_lerobots_configuration(tmp_path: Path) -> None:
    migrated = migrate(written(tmp_path, json.dumps(LEROBOT), "train_config.json"))
    run, notes = migrated.run, "\n".join(migrated.notes)
    assert (run.name, run.model.pi05, run.model.action_horizon, run.model.dtype) == ("arm_pi05", True, 20, "bfloat16")
    assert run.model.freeze == ("vision", "vlm")
    assert run.data.robot.cameras == {
        "base_0_rgb": "observation.images.top", "left_wrist_0_rgb": "observation.images.hand"
    }  # fmt: skip
    assert run.data.robot.delta_mask == (1, 1, 1, 1, 1, -1)
    assert (run.data.use_quantile_norm, run.data.augment, run.optim.ema_decay) == (True, False, None)
    assert (run.optim.warmup_steps, run.optim.decay_steps, run.optim.weight_decay) == (100, 3000, 0.01)
    assert (run.train.num_train_steps, run.train.save_interval, run.train.seed) == (3000, 1500, 1000)
    for said in ("lerobot/pi05_base", "number of processes", "no EMA", "shortens the schedule", "in LeRobot's order"):
        assert said in notes
    read_back(migrated, tmp_path)


def test_text_of_a_configuration_never_becomes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "x\nopen('ran', 'w')\n"
    policy = LEROBOT["policy"] | {"pretrained_path": evil}
    content = LEROBOT | {"policy": policy, "job_name": evil, "dataset": {"repo_id": evil, "root": evil}}
    migrated = migrate(written(tmp_path, json.dumps(content), "train_config.json"))
    read_back(migrated, tmp_path)
    assert not Path("ran").exists()


@pytest.mark.parametrize("broken", [{"policy": {"type": "act"}}, {"policy": {"type": "pi0"}}, {}])
def test_other_policies_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        migrate(written(tmp_path, json.dumps(broken), "train_config.json"))


def test_the_command_writes_a_recipe_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = written(tmp_path, MINE)
    console = Console(file=io.StringIO(), width=300)
    assert migrate_command(source, "arm", None, console) == 0
    assert recipe("arm.py") == migrate(source, "arm").run
    assert "look at: fsdp_devices=4" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"cannot write arm\.py: it exists"):
        migrate_command(source, "arm", None, console)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm.py", "config.py"]
