"""A training step on real data sets of every LeRobot version: set PISTON_DATASETS to a folder of such directories."""

import dataclasses
import math
import os
from pathlib import Path

import pytest

from piston.config.recipes import recipe
from piston.config.schema import SHIPPED_TOKENIZER, DataConfig, RobotConfig, RunConfig
from piston.data.lerobot import open_dataset
from piston.data.stats import compute_norm_stats, save_norm_stats
from piston.train.loop import train

FOLDER = os.environ.get("PISTON_DATASETS")
SETS = sorted(path.parent.parent for path in Path(FOLDER).glob("*/meta/info.json")) if FOLDER else []


def run_on(root: Path, tmp_path: Path) -> RunConfig:
    """One step of the tiny debug model on a data set, its cameras by the names of their slots."""
    ds = open_dataset(root)
    slots = {"base_0_rgb": "high", "left_wrist_0_rgb": "left", "right_wrist_0_rgb": "right"}
    cameras = {slot: key for slot, part in slots.items() for key in ds.image_keys if part in key}
    state_dim, action_dim = (ds.column(key).shape[1] for key in ("observation.state", "action"))
    robot = RobotConfig(
        name="generic", cameras=cameras, state_keys=("observation.state",), action_key="action",
        state_dim=state_dim, action_dim=action_dim,
    )  # fmt: skip
    base = recipe("debug_cpu")
    dims = max(state_dim, action_dim)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, action_dim=dims, cameras=tuple(slots), max_token_len=80),
        data=DataConfig(
            root=root, robot=robot, use_quantile_norm=True, tokenizer=SHIPPED_TOKENIZER, num_workers=0,
            norm_stats=tmp_path / "norm_stats.json",
        ),
        train=dataclasses.replace(
            base.train, batch_size=2, num_train_steps=1, checkpoint_dir=tmp_path / "checkpoints", log_interval=1
        ),
    )  # fmt: skip


@pytest.mark.skipif(not SETS, reason="PISTON_DATASETS names no folder of LeRobot directories")
@pytest.mark.parametrize("root", SETS, ids=lambda p: p.name)
def test_a_training_step(root: Path, tmp_path: Path) -> None:
    run = run_on(root, tmp_path)
    assert run.data.norm_stats is not None
    stats = compute_norm_stats(open_dataset(root, check_videos=False), run, batch_size=8)
    save_norm_stats(run.data.norm_stats, stats)
    result = train(run)
    assert result.step == 1
    assert math.isfinite(result.metrics["loss"])
