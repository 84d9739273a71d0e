"""A real data set with videos, its statistics, and runs of a tiny π0.5 on it: the whole path in milliseconds a step."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piston.config.schema import (
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
from piston.data.stats import compute_norm_stats, save_norm_stats
from piston.train.sources import open_run_dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

MakeRun = Callable[..., RunConfig]


def tiny_run(data_root: Path, stats: Path, checkpoints: Path, **changes: Any) -> RunConfig:
    """`changes`: fields of TrainConfig, of DataConfig or of OptimConfig."""
    gemma = GemmaConfig(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    model = ModelConfig(
        pi05=True,
        dtype="float32",
        paligemma=gemma,
        action_expert=gemma,
        siglip=SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2),
        vocab_size=1024,
        image_size=(28, 28),
        action_dim=6,
        action_horizon=5,
        max_token_len=48,
        discrete_state_input=True,
    )
    robot = RobotConfig(
        "toy",
        {"base_0_rgb": "observation.images.top", "left_wrist_0_rgb": "observation.images.wrist"},
        ("observation.state",),
        "action",
        state_dim=4,
        action_dim=4,
        delta_mask=(3, -1),
    )
    data = DataConfig(
        root=data_root,
        robot=robot,
        norm_stats=stats,
        tokenizer=SHIPPED_TOKENIZER,
        use_quantile_norm=True,
        num_workers=0,
    )
    optim = OptimConfig(warmup_steps=2, peak_lr=3e-3, decay_steps=50, decay_lr=1e-4, ema_decay=0.9)
    train = TrainConfig(
        batch_size=8,
        num_train_steps=10,
        log_interval=1,
        save_interval=4,
        validation_interval=5,
        validation_batches=2,
        keep_period=None,
        device="cpu",
        checkpoint_dir=checkpoints,
    )
    for room in (data, optim, train):
        fields = {f.name for f in dataclasses.fields(room)}
        chosen = {name: changes.pop(name) for name in list(changes) if name in fields}
        if room is data:
            data = dataclasses.replace(data, **chosen)
        elif room is optim:
            optim = dataclasses.replace(optim, **chosen)
        else:
            train = dataclasses.replace(train, **chosen)
    assert not changes, f"no such field: {changes}"
    return RunConfig("tiny", model, data, optim, train)


@pytest.fixture(scope="session")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A LeRobot v3.0 directory with two h264 cameras and 57 frames in 5 episodes, and its statistics file."""
    from make_sets import make_set  # pyright: ignore[reportMissingImports]

    folder = tmp_path_factory.mktemp("toy")
    root, stats = make_set(folder / "set"), folder / "norm_stats.json"
    run = tiny_run(root, stats, folder)
    save_norm_stats(stats, compute_norm_stats(open_run_dataset(run), run, batch_size=8))
    return root, stats


@pytest.fixture
def make_run(data_set: tuple[Path, Path], tmp_path: Path) -> MakeRun:
    """make_run(**changes) → a run whose checkpoints go to tmp_path."""

    def make(**changes: Any) -> RunConfig:
        root, stats = data_set
        return tiny_run(**{"data_root": root, "stats": stats, "checkpoints": tmp_path, **changes})

    return make
