"""A checkpoint of the demo recipe whose weights are random but look at everything they are given."""

from importlib import resources
from pathlib import Path

import pytest
from fake_policies import between, random_model

from piston.config.recipes import recipe
from piston.config.schema import RunConfig
from piston.data.norm import NormStats, save_norm_stats
from piston.train.checkpoint import write_checkpoint
from piston.train.provenance import run_json

SHIPPED = (resources.files("piston") / "assets" / "small.model").read_bytes()


@pytest.fixture(scope="session")
def run() -> RunConfig:
    return recipe("demo")


@pytest.fixture(scope="session")
def stats() -> NormStats:
    return {
        "state": between([1.0, -3.0, 0.0, 0.0, 0.0], [4.0, -1.0, 2.0, 1.0, 1.0]),
        "actions": between([-0.5, -0.2], [0.5, 0.6]),
    }


@pytest.fixture(scope="session")
def checkpoint(run: RunConfig, stats: NormStats, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw weights of seed 1, EMA weights of seed 2."""
    folder = tmp_path_factory.mktemp("experiment")
    save_norm_stats(folder / "norm_stats.json", stats)
    files = {
        "run.json": run_json(run).encode(),
        "norm_stats.json": (folder / "norm_stats.json").read_bytes(),
        "tokenizer.model": SHIPPED,
    }
    tensors = {"model": random_model(run, 1).state_dict(), "ema": random_model(run, 2).state_dict()}
    write_checkpoint(folder / "5", 5, tensors, files)
    return folder / "5"
