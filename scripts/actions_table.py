"""One checkpoint, one observation and noise: actions of openpi JAX, openpi PyTorch, LeRobot and Piston, compared.

    .venv/bin/python scripts/actions_table.py WORK --openpi-pytorch PYTHON --lerobot PYTHON

WORK is a new directory. A peer is a Python interpreter with that project installed (scripts/peers/ says what); openpi's
JAX code runs in .venv-live. The model is small, every parameter random; the classes and loaders are the peers' own.
Prints relative L2 differences, exit code 1 if one is above the limit.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from piston.batch import Observation
from piston.config.robots import generic
from piston.config.schema import DataConfig, GemmaConfig, ModelConfig, RunConfig, SiglipConfig
from piston.config.serialize import to_json
from piston.convert.convert import Target, convert
from piston.convert.extras import Given
from piston.data.norm import KeyStats, normalize, save_norm_stats, unnormalize
from piston.model.pi0 import Pi0
from piston.train.checkpoint import load_policy_weights, open_checkpoint
from piston.verify.live import arch_of
from piston.weights.opened import RUN_KEY

ROOT = Path(__file__).parents[1]
LIMIT = 5e-5  # float32; the PyTorch ports embed the time in float64. A wrong tensor is above 1e-2
TARGETS: tuple[Target, ...] = ("openpi-jax", "openpi-pytorch", "lerobot", "piston")


def small_run(*, pi05: bool) -> RunConfig:
    """Widths as unlike each other as the peers allow (their action dimension is 32, their images square)."""
    vlm = GemmaConfig(width=48, depth=3, mlp_dim=80, num_heads=4, num_kv_heads=1, head_dim=16)
    model = ModelConfig(
        pi05=pi05,
        dtype="float32",
        paligemma=vlm,
        action_expert=dataclasses.replace(vlm, width=32, mlp_dim=56),
        siglip=SiglipConfig(width=40, depth=2, mlp_dim=72, num_heads=2),
        vocab_size=300,
        image_size=(56, 56),
        action_horizon=7,
        max_token_len=11,
        discrete_state_input=pi05,
    )
    cameras = {slot: f"observation.images.{slot}" for slot in model.cameras}
    robot = generic(cameras=cameras, state_dim=8, action_dim=7)
    return RunConfig("peers", model, DataConfig(repo_id="peers", robot=robot, use_quantile_norm=pi05))


def write_checkpoint(directory: Path, run: RunConfig) -> dict[str, KeyStats]:
    """The checkpoint in every layout, with statistics."""
    model, generator = Pi0.build(run.model, device="cpu", seed=0), torch.Generator().manual_seed(1)
    state = {name: p + 0.05 * torch.randn(p.shape, generator=generator) for name, p in model.state_dict().items()}
    save_file(state, directory / "source.safetensors", metadata={RUN_KEY: to_json(run)})
    rng = np.random.default_rng(2)

    def one(dim: int) -> KeyStats:
        q01 = rng.normal(size=dim)
        return KeyStats(rng.normal(size=dim), rng.random(dim) + 0.5, q01, q01 + rng.random(dim) + 1)

    stats = {"state": one(run.data.robot.state_dim), "actions": one(run.data.robot.action_dim)}
    save_norm_stats(directory / "norm_stats.json", stats)
    given = Given(stats=directory / "norm_stats.json")
    for to in TARGETS:
        convert(directory / "source.safetensors", directory / to, to, given=given)
    config = directory / "lerobot" / "config.json"  # LeRobot refuses names of sizes that are not its own
    named = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    (directory / "arch.json").write_text(json.dumps(arch_of(run.model)))
    return stats


def write_inputs(directory: Path, run: RunConfig, batch: int = 2) -> dict[str, np.ndarray]:
    """Observations with ragged prompts and a masked camera in the middle."""
    model, rng = run.model, np.random.default_rng(3)
    inputs: dict[str, np.ndarray] = {}
    for number, camera in enumerate(model.cameras):
        inputs[f"images/{camera}"] = rng.uniform(-1, 1, (batch, *model.image_size, 3)).astype(np.float32)
        inputs[f"image_masks/{camera}"] = np.array([number != 1, True])
    tokens = np.arange(model.max_token_len)
    inputs["tokenized_prompt"] = rng.integers(1, model.vocab_size - 2, (batch, model.max_token_len)).astype(np.int32)
    inputs["tokenized_prompt_mask"] = np.stack([tokens < 6, tokens < model.max_token_len])
    inputs["state"] = rng.uniform(-1, 1, (batch, model.action_dim)).astype(np.float32)
    inputs["noise"] = rng.normal(size=(batch, model.action_horizon, model.action_dim)).astype(np.float32)
    inputs["raw_state"] = rng.normal(size=run.data.robot.state_dim).astype(np.float32)
    inputs["raw_action"] = rng.normal(size=run.data.robot.action_dim).astype(np.float32)
    np.savez(directory / "inputs.npz", allow_pickle=False, **inputs)
    return inputs


def piston_actions(directory: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    run = open_checkpoint(directory / "piston").run
    model = Pi0.build(run.model, device="cpu", seed=5)
    model.load_state_dict(load_policy_weights(directory / "piston"))
    cameras = run.model.cameras
    observation = Observation(
        images=torch.from_numpy(np.stack([inputs[f"images/{camera}"] for camera in cameras], axis=1)),
        image_masks=torch.from_numpy(np.stack([inputs[f"image_masks/{camera}"] for camera in cameras], axis=1)),
        **{name: torch.from_numpy(inputs[name]) for name in ("state", "tokenized_prompt", "tokenized_prompt_mask")},
    )
    with torch.inference_mode():
        return model.eval().sample_actions(observation, torch.from_numpy(inputs["noise"]), 10).numpy()


def relative_l2(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def processors_agree(directory: Path, run: RunConfig, stats: dict[str, KeyStats], inputs: dict[str, Any]) -> float:
    """Largest difference between LeRobot's normaliser, loaded from what Piston wrote, and Piston's."""
    theirs, quantiles = np.load(directory / "processed_lerobot.npz"), run.data.use_quantile_norm
    state = normalize(inputs["raw_state"], stats["state"], use_quantiles=quantiles)
    action = unnormalize(inputs["raw_action"], stats["actions"], use_quantiles=quantiles)
    return max(np.abs(theirs["state"][0] - state).max(), np.abs(theirs["action"][0] - action).max())


def compare(directory: Path, peers: dict[str, Path], *, pi05: bool) -> tuple[Table, float]:
    directory.mkdir(parents=True)
    run = small_run(pi05=pi05)
    stats, inputs = write_checkpoint(directory, run), write_inputs(directory, run)
    actions = {"piston": piston_actions(directory, inputs)}
    for name, python in peers.items():
        script = ROOT / "scripts" / "peers" / f"{name}.py"
        done = subprocess.run([python, script, directory], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        actions[name] = np.load(directory / f"actions_{name}.npy")
    table = Table("π0.5" if pi05 else "π0", *actions, title="relative L2 of the actions, float32")
    for name, mine in actions.items():
        table.add_row(name, *(f"{relative_l2(mine, theirs):.1e}" for theirs in actions.values()))
    worst = max(relative_l2(a, b) for a in actions.values() for b in actions.values())
    if "lerobot" in peers:
        worst_processor = processors_agree(directory, run, stats, inputs)
        table.caption = f"LeRobot's normalisers, loaded from Piston's files: differ by {worst_processor:.1e}"
        worst = max(worst, worst_processor)
    return table, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--openpi-jax", type=Path, default=ROOT / ".venv-live" / "bin" / "python")
    parser.add_argument("--openpi-pytorch", type=Path)
    parser.add_argument("--lerobot", type=Path)
    args = parser.parse_args()
    chosen = {name: getattr(args, name) for name in ("openpi_jax", "openpi_pytorch", "lerobot")}
    peers = {name: python.absolute() for name, python in chosen.items() if python is not None and python.exists()}
    console, worst = Console(), 0.0
    for pi05 in (False, True):
        table, difference = compare(args.work / ("pi05" if pi05 else "pi0"), peers, pi05=pi05)
        console.print(table)
        worst = max(worst, difference)
    console.print(f"largest difference {worst:.1e}, limit {LIMIT:.0e}")
    sys.exit(1 if worst > LIMIT or not peers else 0)


if __name__ == "__main__":
    main()
