"""The whole ways in and out: order, shapes, images, padding, prompts; and the way out undoes the way in."""

import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.config.recipes import recipe
from piston.config.robots import ROBOTS
from piston.config.schema import CAMERAS, SHIPPED_TOKENIZER, RobotConfig, RunConfig
from piston.data import transforms as room
from piston.data.norm import KeyStats, NormStats, normalize
from piston.data.prompt import Tokenizer, load_tokenizer, tokenize
from piston.data.resize import pillow_resize_with_pad
from piston.data.transforms import input_transform, output_transform, pad_to_dim, to_uint8_image

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "preprocess_transforms.npz"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED_TOKENIZER)


def run_for(robot: RobotConfig, **model: object) -> RunConfig:
    """The debug recipe with another robot, at 20 x 30 pixels of 10-pixel patches, so height and width differ."""
    run = recipe("debug_pi05")
    siglip = dataclasses.replace(run.model.siglip, patch_size=(10, 10))
    changes = {"image_size": (20, 30), "action_horizon": 5, "siglip": siglip, **model}
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **changes),
        data=dataclasses.replace(run.data, robot=robot, default_prompt="do it"),
    )


def random_stats(robot: RobotConfig, seed: int = 0) -> NormStats:
    rng = np.random.default_rng(seed)

    def one(dim: int) -> KeyStats:
        q01 = rng.normal(size=dim)
        return KeyStats(rng.normal(size=dim), rng.random(dim) + 0.1, q01, q01 + rng.random(dim) + 0.1)

    return {"state": one(robot.state_dim), "actions": one(robot.action_dim)}


def sample_for(robot: RobotConfig, seed: int = 0, size: tuple[int, int] = (20, 30)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "images": {slot: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for slot in robot.cameras},
        "state": rng.normal(size=robot.state_dim).astype(np.float32),
        "actions": rng.normal(size=(5, robot.action_dim)).astype(np.float32),
        "prompt": "reach the red block",
    }


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=lambda robot: robot.name)
@pytest.mark.parametrize("recipe_name", ["debug", "debug_pi05"])
def test_layout(robot: RobotConfig, recipe_name: str, tokenizer: Tokenizer) -> None:
    run = run_for(robot)
    run = dataclasses.replace(
        recipe(recipe_name),
        data=dataclasses.replace(recipe(recipe_name).data, robot=robot),
        model=dataclasses.replace(recipe(recipe_name).model, action_horizon=5, image_size=(28, 42)),
    )
    out = input_transform(run, random_stats(robot), tokenizer)(sample_for(robot))
    expected = {
        "images": ((3, 28, 42, 3), np.uint8),
        "image_masks": ((3,), np.bool_),
        "state": ((32,), np.float32),
        "tokenized_prompt": ((run.model.max_token_len,), np.int32),
        "tokenized_prompt_mask": ((run.model.max_token_len,), np.bool_),
        "actions": ((5, 32), np.float32),
    }
    assert {name: (value.shape, value.dtype.type) for name, value in out.items()} == expected
    assert out["image_masks"].tolist() == [slot in robot.cameras for slot in CAMERAS]
    assert not out["state"][robot.state_dim :].any()  # padded after normalisation: exactly zero
    assert not out["actions"][:, robot.action_dim :].any()


def test_numbers_follow_the_reference_order(tokenizer: Tokenizer) -> None:
    """Deltas of raw numbers, then normalised in float64, then the prompt's bins of the unrounded state."""
    robot = ROBOTS["libero_extra_delta"]
    run, stats, sample = run_for(robot), random_stats(robot), sample_for(robot)
    out = input_transform(run, stats, tokenizer)(sample)
    delta = sample["actions"].copy()
    delta[:, :6] -= sample["state"][:6]
    state = normalize(sample["state"], stats["state"], use_quantiles=True)
    assert np.array_equal(out["state"][:8], state.astype(np.float32))
    actions = normalize(delta, stats["actions"], use_quantiles=True)
    assert np.array_equal(out["actions"][:, :7], actions.astype(np.float32))
    tokens, mask = tokenize(tokenizer, "reach the red block", state, run.model.max_token_len)
    assert np.array_equal(out["tokenized_prompt"], tokens)
    assert np.array_equal(out["tokenized_prompt_mask"], mask)


def test_no_statistics_means_no_normalisation(tokenizer: Tokenizer) -> None:
    robot = ROBOTS["libero"]
    sample = sample_for(robot)
    out = input_transform(run_for(robot), None, tokenizer)(sample)
    assert np.array_equal(out["state"][:8], sample["state"])
    back = output_transform(run_for(robot), None)({"state": out["state"], "actions": out["actions"]})
    assert np.array_equal(back["actions"], sample["actions"])


@pytest.mark.parametrize("robot", ROBOTS.values(), ids=lambda robot: robot.name)
@pytest.mark.parametrize("use_quantile_norm", [False, True])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_the_way_out_undoes_the_way_in(robot: RobotConfig, use_quantile_norm: bool, data: st.DataObject) -> None:
    run = run_for(robot)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, use_quantile_norm=use_quantile_norm))
    sample = sample_for(robot)
    numbers = st.floats(-3, 3, width=32)
    sample["state"] = data.draw(hnp.arrays(np.float32, robot.state_dim, elements=numbers))
    sample["actions"] = data.draw(hnp.arrays(np.float32, (5, robot.action_dim), elements=numbers))
    stats = random_stats(robot, data.draw(st.integers(0, 5)))
    out = input_transform(run, stats, load_tokenizer(SHIPPED_TOKENIZER))(sample)
    back = output_transform(run, stats)(out)["actions"]
    assert back.dtype == np.float32
    assert back.shape == (5, robot.action_dim)
    np.testing.assert_allclose(back, sample["actions"], rtol=1e-5, atol=2e-5)


def test_the_way_out_takes_many_at_once(tokenizer: Tokenizer) -> None:
    robot = ROBOTS["aloha"]
    run, stats = run_for(robot), random_stats(robot)
    outs = [input_transform(run, stats, tokenizer)(sample_for(robot, seed)) for seed in range(3)]
    stacked = {name: np.stack([out[name] for out in outs]) for name in ("state", "actions")}
    outputs = output_transform(run, stats)
    together = outputs(stacked)["actions"]
    for i, out in enumerate(outs):
        assert np.array_equal(together[i], outputs(out)["actions"])


def test_padding_equals_openpi() -> None:
    assert np.array_equal(pad_to_dim(GOLDEN["pad/state_in"], 32), GOLDEN["pad/state_out"])
    assert np.array_equal(pad_to_dim(GOLDEN["pad/actions_in"], 32), GOLDEN["pad/actions_out"])
    assert np.array_equal(pad_to_dim(GOLDEN["pad/wide_state_in"], 32), GOLDEN["pad/wide_state_out"])


def test_serving_needs_no_actions(tokenizer: Tokenizer) -> None:
    robot = ROBOTS["aloha"]
    sample = sample_for(robot)
    inputs = input_transform(run_for(robot), random_stats(robot), tokenizer)
    with_actions = inputs(sample)
    del sample["actions"]
    without = inputs(sample)
    assert "actions" not in without
    for name, value in without.items():
        assert np.array_equal(value, with_actions[name])


def test_inputs_are_left_alone(tokenizer: Tokenizer) -> None:
    robot = ROBOTS["aloha"]
    sample = sample_for(robot)
    before = pickle.loads(pickle.dumps(sample))
    input_transform(run_for(robot), random_stats(robot), tokenizer)(sample)
    for name in ("state", "actions"):
        assert np.array_equal(sample[name], before[name])


def test_images_are_placed_resized_and_masked(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    robot = ROBOTS["aloha"]
    sample = sample_for(robot, size=(50, 41))
    del sample["images"]["left_wrist_0_rgb"]
    room._absent.clear()
    with caplog.at_level(logging.WARNING):
        inputs = input_transform(run_for(robot), random_stats(robot), tokenizer)
        out, _ = inputs(sample), inputs(sample)
    assert out["image_masks"].tolist() == [True, False, True]
    assert not out["images"][1].any()
    for slot, camera in ((0, "base_0_rgb"), (2, "right_wrist_0_rgb")):
        assert np.array_equal(out["images"][slot], pillow_resize_with_pad(sample["images"][camera], 20, 30))
    assert [record.getMessage().count("left_wrist_0_rgb") for record in caplog.records] == [1]


def test_float_and_channel_first_images_are_the_same_images() -> None:
    image = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    ramp = np.arange(256, dtype=np.uint8).reshape(8, 32, 1).repeat(3, axis=2)
    for dtype in (np.float32, np.float64):
        assert np.array_equal(to_uint8_image(ramp / dtype(255), "base"), ramp)  # every k/255 comes back
    assert np.array_equal(to_uint8_image(np.moveaxis(image, -1, 0), "base"), image)
    assert to_uint8_image(image, "base") is image


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 5), np.uint8),
        np.zeros((4, 5, 4), np.uint8),
        np.zeros((1, 4, 5, 3), np.uint8),
        np.zeros((0, 5, 3), np.uint8),
        np.full((4, 5, 3), 2.0, np.float32),
        np.full((4, 5, 3), np.nan, np.float32),
        np.full((4, 5, 3), -1.0, np.float32),
        np.zeros((4, 5, 3), np.int16),
    ],
)
def test_other_images_are_errors(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"camera left_wrist_0_rgb.*expected"):
        to_uint8_image(image, "left_wrist_0_rgb")


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        (b"reach the red block", "reach the red block"),
        (np.array("reach"), "reach"),
        ("", ""),
        ("prends le cube ñ 机器人 🤖", "prends le cube ñ 机器人 🤖"),
        (None, "do it"),
    ],
)
def test_prompts(prompt: object, meant: str, tokenizer: Tokenizer) -> None:
    robot = ROBOTS["libero"]
    run = run_for(robot, discrete_state_input=False)
    out = input_transform(run, None, tokenizer)(sample_for(robot) | {"prompt": prompt})
    assert np.array_equal(out["tokenized_prompt"], tokenize(tokenizer, meant, None, 200)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": np.zeros(7, np.float32)}, r"state .* shape \(7,\); expected \(8,\) for robot libero"),
        ({"actions": np.zeros((4, 7), np.float32)}, r"actions .* shape \(4, 7\); expected \(5, 7\)"),
        ({"actions": np.zeros((5, 33), np.float32)}, r"actions .* shape \(5, 33\)"),
        ({"state": np.full(8, np.nan, np.float32)}, "state .* NaN or infinity in dimension 0, 1"),
        ({"actions": np.array([[0.0] * 6 + [np.inf]] * 5, np.float32)}, "NaN or infinity in dimension 6; expected"),
        ({"images": {}}, "no camera"),
        ({"images": {"top": np.zeros((4, 4, 3), np.uint8)}}, r"images of \['top'\]; expected .*base_0_rgb"),
    ],
)
def test_bad_samples_are_errors(change: dict, message: str, tokenizer: Tokenizer) -> None:
    robot = ROBOTS["libero"]
    inputs = input_transform(run_for(robot), random_stats(robot), tokenizer)
    with pytest.raises(ValueError, match=message):
        inputs(sample_for(robot) | change)


def test_no_prompt_at_all_is_an_error(tokenizer: Tokenizer) -> None:
    run = run_for(ROBOTS["libero"])
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, default_prompt=None))
    with pytest.raises(ValueError, match=r"no prompt.*--data\.default-prompt"):
        input_transform(run, None, tokenizer)(sample_for(ROBOTS["libero"]) | {"prompt": None})


def test_misfits_are_found_before_the_first_sample(tokenizer: Tokenizer) -> None:
    run = run_for(ROBOTS["aloha"])
    for make in (lambda stats: input_transform(run, stats, tokenizer), lambda stats: output_transform(run, stats)):
        with pytest.raises(ValueError, match="robot aloha has 14"):
            make(random_stats(ROBOTS["libero"]))
    with pytest.raises(ValueError, match="1024 pieces"):
        input_transform(run_for(ROBOTS["libero"], vocab_size=100), None, tokenizer)


def test_ids_outside_the_embedding_are_errors() -> None:
    class Added:
        vocab_size, bos_id = 10, 2

        def encode(self, text: str) -> list[int]:
            return [10]

    with pytest.raises(ValueError, match="token 10, the model embeds ids below 10"):
        input_transform(run_for(ROBOTS["libero"], vocab_size=10), None, Added())(sample_for(ROBOTS["libero"]))


def test_transforms_travel_to_loader_processes(tokenizer: Tokenizer) -> None:
    robot = ROBOTS["droid"]
    run, stats, sample = run_for(robot), random_stats(robot), sample_for(robot)
    inputs = input_transform(run, stats, tokenizer)
    copy = pickle.loads(pickle.dumps(inputs))
    for name, value in inputs(sample).items():
        assert np.array_equal(copy(sample)[name], value)
    assert pickle.loads(pickle.dumps(output_transform(run, stats))).run == run
