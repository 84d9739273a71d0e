"""run.json holds exactly what ran."""

import dataclasses
import json
from pathlib import Path

import pytest

from piston.config.schema import (
    GEMMA_VARIANTS,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RobotConfig,
    RunConfig,
    TrainConfig,
)
from piston.config.serialize import from_dict, from_json, leaves, to_dict, to_json


def unusual() -> RunConfig:
    robot = RobotConfig(
        "arm", {"base_0_rgb": "cam/é", "left_wrist_0_rgb": "w"}, ("a", "b"), "act", 6, 7, (6, -1), fps=10
    )
    model = ModelConfig(
        pi05=True,
        dtype="float32",
        paligemma=dataclasses.replace(GEMMA_VARIANTS["dummy"], lora_attn=LoraConfig(4, 8.0, rslora=True)),
        action_expert=GEMMA_VARIANTS["dummy"],
        image_size=(28, 56),
        cameras=("base_0_rgb", "left_wrist_0_rgb"),
    )
    data = DataConfig(root=Path("/some where/set"), robot=robot, default_prompt='say "hi"', tolerance_s=0.1 + 0.2)
    return RunConfig("odd", model, data, OptimConfig(ema_decay=None, peak_lr=1e-300), TrainConfig(keep_period=None))


@pytest.mark.parametrize("run", [RunConfig("plain"), unusual()], ids=["defaults", "unusual"])
def test_round_trip_is_exact(run: RunConfig) -> None:
    again = from_json(to_json(run))
    assert again == run
    assert to_json(again) == to_json(run)
    assert isinstance(again.train.checkpoint_dir, Path)
    assert isinstance(again.model.cameras, tuple)
    assert from_json(json.dumps({"run": to_dict(run), "versions": {"torch": "x"}})) == run


def test_whole_numbers_written_by_hand_become_floats() -> None:
    values = to_dict(RunConfig("plain"))
    values["optim"]["eps"] = 1
    eps = from_dict(values).optim.eps
    assert isinstance(eps, float)
    assert eps == 1.0


def test_fields_left_out_take_their_defaults() -> None:
    assert from_dict({"name": "plain"}) == RunConfig("plain")
    with pytest.raises(ValueError, match="lacks the field `name`"):
        from_dict({})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optim.peek_lr", 1.0, r"run\.optim has an unknown field `peek_lr`.*did you mean `peak_lr`\?"),
        ("train.zzz", 1, r"run\.train has an unknown field `zzz`.*its fields are"),
        ("optim.peak_lr", "fast", r"run\.optim\.peak_lr is 'fast' \(str\), expected a float"),
        ("train.batch_size", 2.5, r"run\.train\.batch_size is 2\.5 \(float\), expected a int"),
        ("train.batch_size", True, r"run\.train\.batch_size is True"),
        ("model.dtype", "fp8", r"run\.model\.dtype is 'fp8'.*one of \['bfloat16', 'float32'\]"),
        ("model.image_size", [1, 2, 3], r"run\.model\.image_size is \[1, 2, 3\].*a list of 2"),
        ("model.cameras", "base", r"run\.model\.cameras is 'base'.*a list"),
        ("data.root", 3, r"run\.data\.root is 3.*a path"),
        ("data.robot", [], r"run\.data\.robot is \[\].*RobotConfig"),
        ("optim.ema_decay", 1.5, "ema_decay is 1.5"),
    ],
)
def test_wrong_values_name_the_field(path: str, value: object, message: str) -> None:
    values = to_dict(RunConfig("plain"))
    room, name = path.split(".")
    values[room][name] = value
    with pytest.raises(ValueError, match=message):
        from_dict(values)


@pytest.mark.parametrize("text", ["", " ", "{", '{"run": {"name": ', "hello"])
def test_what_is_no_json_is_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"run\.json is not JSON \(.*expected the one of a run's directory"):
        from_json(text)


def test_leaves_are_dotted_paths() -> None:
    flat = leaves(unusual())
    assert flat["data.robot.cameras.base_0_rgb"] == "cam/é"
    assert flat["model.paligemma.lora_attn.rank"] == 4
    assert flat["model.cameras"] == ["base_0_rgb", "left_wrist_0_rgb"]
