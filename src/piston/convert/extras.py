"""What travels with the weights: statistics, tokenizer, robot and horizon, in every layout's own files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from piston.config.robots import generic
from piston.config.schema import GEMMA_VARIANTS, PALIGEMMA_VOCAB_SIZE, DataConfig, ModelConfig, RunConfig
from piston.config.serialize import to_json
from piston.data.norm import FIELDS, KeyStats, NormStats, load_norm_stats, save_norm_stats
from piston.weights.files import Safetensors, read_json
from piston.weights.opened import RUN_KEY, Weights

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
LEROBOT_KEYS = {"state": "observation.state", "actions": "action"}
PALIGEMMA_TOKENIZER = "google/paligemma-3b-pt-224"  # LeRobot's reference to it


@dataclass(frozen=True)
class Extras:
    """`run`: the recipe or run the weights belong to, its model being that of the weights."""

    run: RunConfig
    known: bool  # whether the run is more than the weights' sizes
    stats: NormStats | None
    asset_id: str
    tokenizer: Path | None  # a file
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """What the user adds to a checkpoint or puts in place of what it holds."""

    run: RunConfig | None = None
    stats: Path | None = None
    tokenizer: Path | None = None
    asset_id: str | None = None


def collect(weights: Weights, given: Given) -> Extras:
    """What the checkpoint holds besides weights, the user's own in front of it."""
    notes: list[str] = []
    run = given.run or weights.run
    known = run is not None
    if run is None:
        run = _unknown_robot(weights.config)
        notes.append("the robot (cameras, dimensions, deltas) is not in the checkpoint: name a recipe with --recipe")
    model = _with_horizon(weights, given)
    unknown = [name for name in weights.guessed if getattr(model, name, None) == getattr(weights.config, name, ())]
    if given.run is None and unknown:
        notes.append(f"not in the checkpoint, so openpi's defaults: {', '.join(unknown)} (give them with --recipe)")
    stats, asset_id = _stats(weights, given, notes)
    tokenizer = given.tokenizer or next(iter(sorted(weights.directory.glob("tokenizer.*"))), None)
    travelling = replace(run, model=model)
    return Extras(travelling, known, stats, given.asset_id or asset_id or run.data.repo_id, tokenizer, tuple(notes))


def _unknown_robot(model: ModelConfig) -> RunConfig:
    """A run whose robot fills the model: every camera slot under its own name, every dimension, no deltas."""
    cameras = {slot: f"observation.images.{slot}" for slot in model.cameras}
    robot = generic(cameras=cameras, state_dim=model.action_dim, action_dim=model.action_dim)
    return RunConfig(name="converted", model=model, data=DataConfig(robot=robot, use_quantile_norm=model.pi05))


def _with_horizon(weights: Weights, given: Given) -> ModelConfig:
    """The weights' model with what LeRobot's or openpi's config.json says about horizon and prompt length."""
    model, file = weights.config, weights.directory / "config.json"
    if (
        given.run is not None
        or weights.run is not None
        or weights.layout not in ("lerobot", "openpi-pytorch")
        or not file.is_file()
    ):
        return model
    stated = read_json(file)
    names = {
        "lerobot": {"chunk_size": "action_horizon", "tokenizer_max_length": "max_token_len"},
        "openpi-pytorch": {"action_horizon": "action_horizon"},
    }[weights.layout]
    return replace(model, **{ours: int(stated[theirs]) for theirs, ours in names.items() if theirs in stated})


def _stats(weights: Weights, given: Given, notes: list[str]) -> tuple[NormStats | None, str | None]:
    directory = weights.directory
    if given.stats is not None:
        return load_norm_stats(given.stats), None
    if weights.layout == "piston" and (directory / "norm_stats.json").is_file():
        return load_norm_stats(directory / "norm_stats.json"), None
    if weights.layout == "lerobot":
        return _lerobot_stats(directory, notes), None
    assets = directory / "assets"
    found = sorted(assets.rglob("norm_stats.json")) or sorted(directory.glob("norm_stats.json"))
    if given.asset_id is not None and len(found) > 1:
        found = [file for file in found if str(file.parent.relative_to(assets)) == given.asset_id]
    if len(found) > 1:
        names = [str(file.parent.relative_to(assets)) for file in found]
        raise ValueError(f"{assets} holds statistics of {names}, expected those of one robot: choose with --asset-id")
    if not found:
        notes.append(f"{directory} holds no norm_stats.json: no statistics travel (give them with --norm-stats)")
        return None, None
    inside = found[0].is_relative_to(assets)
    return load_norm_stats(found[0]), str(found[0].parent.relative_to(assets)) if inside else None


def _lerobot_stats(directory: Path, notes: list[str]) -> NormStats | None:
    """Statistics from the state file of the preprocessor's normaliser, float32 there."""
    config = directory / PREPROCESSOR
    steps = read_json(config).get("steps", []) if config.is_file() else []
    files = [
        step["state_file"] for step in steps if "normalizer" in str(step.get("registry_name")) and "state_file" in step
    ]
    if not files:
        notes.append(f"{directory} has no normaliser with statistics: none travel (give them with --norm-stats)")
        return None
    if Path(files[0]).name != files[0]:
        raise ValueError(f"{config} names {files[0]}, outside of the checkpoint; expected a file next to it")
    tensors = Safetensors([directory / files[0]])
    stats: NormStats = {}
    for ours, theirs in LEROBOT_KEYS.items():
        values = {
            name: tensors.read(f"{theirs}.{name}", None).double().numpy().reshape(-1)
            for name in FIELDS
            if f"{theirs}.{name}" in tensors.specs
        }
        if {"mean", "std"} <= values.keys():
            stats[ours] = KeyStats(**values)
    if not stats:
        notes.append(f"{directory / files[0]} has no mean and std of state and action: none travel")
        return None
    notes.append("LeRobot's statistics are of single actions, without deltas: openpi's are of chunks; compare them")
    return stats


def header(extras: Extras) -> dict[str, str]:
    """What files that have room for it say about the run: paths of this machine are left out."""
    if not extras.known:
        return {}
    data = replace(extras.run.data, root=None, norm_stats=None, tokenizer=None)
    train = replace(extras.run.train, init=None, checkpoint_dir=Path("checkpoints"))
    return {RUN_KEY: to_json(replace(extras.run, data=data, train=train))}


# --- writing ---------------------------------------------------------------------------------------------------------


def write_openpi(directory: Path, extras: Extras, notes: list[str], *, pytorch: bool) -> None:
    """assets/<asset id>/norm_stats.json, and config.json next to PyTorch weights."""
    model = extras.run.model
    if extras.stats is not None:
        save_norm_stats(directory / "assets" / extras.asset_id / "norm_stats.json", extras.stats)
        notes.append(f"statistics: assets/{extras.asset_id}/norm_stats.json; the openpi config's asset_id must be this")
    if model.vocab_size == PALIGEMMA_VOCAB_SIZE:
        notes.append("openpi fetches PaliGemma's tokenizer itself: none is written")
    else:
        notes.append(f"openpi always uses PaliGemma's tokenizer; this model has another, of {model.vocab_size} tokens")
    notes.append(f"openpi keeps robot transforms in code: use its config for {extras.run.data.robot.name}")
    if pytorch:
        content = {
            "action_dim": model.action_dim,
            "action_horizon": model.action_horizon,
            "paligemma_variant": _variant(model, "paligemma", notes),
            "action_expert_variant": _variant(model, "action_expert", notes),
            "precision": model.dtype,
        }
        (directory / "config.json").write_text(json.dumps(content, indent=2))


def _variant(model: ModelConfig, field: str, notes: list[str]) -> str:
    sizes = getattr(model, field)
    for name, variant in GEMMA_VARIANTS.items():
        if variant == sizes:
            return name
    notes.append(f"{field} has no variant name in openpi or LeRobot (width {sizes.width}): build that model yourself")
    return "custom"


def write_lerobot(directory: Path, extras: Extras, dtype: str, notes: list[str]) -> None:
    """config.json, and the pre- and postprocessor with their statistics."""
    run, model = extras.run, extras.run.model
    robot = run.data.robot
    state_dim = robot.state_dim if extras.stats is None else min(robot.state_dim, len(extras.stats["state"].mean))
    features: dict[str, Any] = {
        _lerobot_camera(key): {"type": "VISUAL", "shape": [3, *model.image_size]} for key in robot.cameras.values()
    }
    features["observation.state"] = {"type": "STATE", "shape": [state_dim]}
    outputs = {"action": {"type": "ACTION", "shape": [robot.action_dim]}}
    mode = "QUANTILES" if run.data.use_quantile_norm else "MEAN_STD"
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    config = {
        "type": "pi05" if model.pi05 else "pi0",
        "paligemma_variant": _variant(model, "paligemma", notes),
        "action_expert_variant": _variant(model, "action_expert", notes),
        "dtype": dtype,
        "n_obs_steps": 1,
        "chunk_size": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "max_state_dim": model.action_dim,
        "max_action_dim": model.action_dim,
        "num_inference_steps": 10,
        "image_resolution": list(model.image_size),
        "tokenizer_max_length": model.max_token_len,
        "normalization_mapping": norm_map,
        "input_features": features,
        "output_features": outputs,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _write_processors(directory, extras, {**features, **outputs}, outputs, norm_map)
    notes.append("LeRobot fills absent cameras at the end and resizes without antialiasing: actions differ a little")
    if robot.delta_mask:
        notes.append(f"the robot's delta actions {robot.delta_mask} have no place in the directory: undo them yourself")
    if robot.adapt_to_pi:
        notes.append("ALOHA's joint signs and gripper units have no place in the directory: convert them yourself")
    if model.pi05 and not model.discrete_state_input:
        notes.append("LeRobot's π0.5 always writes the state into the prompt; this model was trained without it")
    if model.vocab_size != PALIGEMMA_VOCAB_SIZE:
        notes.append(f"LeRobot always uses {PALIGEMMA_TOKENIZER}; this model has another tokenizer")


def _lerobot_camera(key: str) -> str:
    return key if key.startswith("observation.images.") else f"observation.images.{key}"


def _write_processors(
    directory: Path, extras: Extras, features: dict[str, Any], outputs: dict[str, Any], norm_map: dict[str, str]
) -> None:
    model = extras.run.model
    stats = {
        f"{LEROBOT_KEYS[key]}.{name}": torch.from_numpy(np.asarray(values, np.float32))
        for key, one in (extras.stats or {}).items()
        if key in LEROBOT_KEYS
        for name in FIELDS
        if (values := getattr(one, name)) is not None
    }

    def normaliser(registry_name: str, which: dict[str, Any], name: str, position: int) -> dict[str, Any]:
        step = {"registry_name": registry_name, "config": {"eps": 1e-8, "features": which, "norm_map": norm_map}}
        if stats:
            step["state_file"] = f"{name}_step_{position}_{registry_name}.safetensors"
            save_file(stats, directory / step["state_file"])
        return step

    tokenizer = {
        "registry_name": "tokenizer_processor",
        "config": {
            "max_length": model.max_token_len, "task_key": "task", "padding_side": "right", "padding": "max_length",
            "truncation": True, "tokenizer_name": PALIGEMMA_TOKENIZER,
        },
    }  # fmt: skip
    head = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
    ]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    if model.pi05:  # the prompt holds the normalised state, so the normaliser comes first
        prompt = {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}}
        before = [
            *head,
            normaliser("normalizer_processor", features, "policy_preprocessor", 2),
            prompt,
            tokenizer,
            device,
        ]
    else:
        newline = {"registry_name": "pi0_new_line_processor", "config": {}}
        last = normaliser("normalizer_processor", features, "policy_preprocessor", 5)
        before = [*head, newline, tokenizer, device, last]
    after = [normaliser("unnormalizer_processor", outputs, "policy_postprocessor", 0), device]
    for name, steps in ((PREPROCESSOR, before), (POSTPROCESSOR, after)):
        content = {"name": name.removesuffix(".json"), "steps": steps}
        (directory / name).write_text(json.dumps(content, indent=2))
