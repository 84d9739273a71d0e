from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_policies import random_model

from piston.config.schema import RunConfig
from piston.data.norm import NormStats
from piston.data.prompt import load_tokenizer
from piston.demo.planar_arm import ArmConfig, PlanarArms, scene
from piston.model.pi0 import Pi0
from piston.serve.policy import Policy, action_noise


@pytest.fixture(scope="module")
def policy(run: RunConfig, stats: NormStats) -> Policy:
    return Policy(run, random_model(run, 0), stats, load_tokenizer(run.data.tokenizer), num_steps=4)


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    arms = PlanarArms(ArmConfig(), [scene(ArmConfig(), 0, n) for n in range(3)])
    images, state = arms.images(), arms.state()
    return [
        {
            "images": {"base_0_rgb": images["base"][n], "left_wrist_0_rgb": images["wrist"][n]},
            "state": state[n],
            "prompt": arms.scenes[n].prompt,
        }
        for n in range(3)
    ]


def test_actions_are_the_robots_and_deterministic(policy: Policy, samples: list[dict[str, Any]]):
    actions = policy.infer(samples[0], seed=3, number=7)
    assert actions.shape == (policy.horizon, policy.run.data.robot.action_dim)
    assert actions.dtype == np.float32
    np.testing.assert_array_equal(actions, policy.infer(samples[0], seed=3, number=7))
    assert not np.allclose(actions, policy.infer(samples[0], seed=4, number=7))
    assert not np.allclose(actions, policy.infer(samples[0], seed=3, number=8))


def test_a_batch_gives_what_each_sample_gives_alone(policy: Policy, samples: list[dict[str, Any]]):
    together = policy.infer_batch(samples, seed=1, numbers=[5, 6, 7])
    for n, sample in enumerate(samples):
        np.testing.assert_allclose(together[n], policy.infer(sample, seed=1, number=5 + n), atol=2e-5)


def test_actions_come_from_images_prompt_and_present_cameras(policy: Policy, samples: list[dict[str, Any]]):
    sample = samples[0]
    actions = policy.infer(sample)
    darker = {slot: image // 2 for slot, image in sample["images"].items()}
    only_base = {"base_0_rgb": sample["images"]["base_0_rgb"]}
    black_wrist = only_base | {"left_wrist_0_rgb": np.zeros_like(sample["images"]["left_wrist_0_rgb"])}
    for changed in (
        {**sample, "images": darker},
        {**sample, "prompt": samples[1]["prompt"]},
        {**sample, "images": only_base},
    ):
        assert np.abs(policy.infer(changed) - actions).max() > 1e-4
    # an absent camera is masked, which is not the same as seeing black
    assert (
        np.abs(policy.infer({**sample, "images": black_wrist}) - policy.infer({**sample, "images": only_base})).max()
        > 1e-4
    )


def test_euler_steps_and_normalisation_are_undone_exactly(
    run: RunConfig, stats: NormStats, samples: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    policy = Policy(
        run, Pi0.build(run.model, device="cpu", seed=0), stats, load_tokenizer(run.data.tokenizer), num_steps=3
    )
    asked: list[tuple[torch.Tensor, int]] = []

    def sample_actions(observation: object, noise: torch.Tensor, num_steps: int) -> torch.Tensor:
        asked.append((noise, num_steps))
        return torch.full_like(noise, 1.0)

    monkeypatch.setattr(policy.model, "sample_actions", sample_actions)
    actions = policy.infer(samples[0], seed=2, number=9)
    np.testing.assert_allclose(actions, np.broadcast_to([0.5, 0.6], actions.shape), atol=1e-5)  # 1 is q99
    ((noise, steps),) = asked
    assert steps == 3
    np.testing.assert_array_equal(noise[0].numpy(), action_noise(2, 9, run.model.action_horizon, run.model.action_dim))


def test_noise_is_standard_normal_and_a_function_of_seed_and_number():
    many = np.stack([action_noise(0, n, 10, 8) for n in range(500)])
    assert many.dtype == np.float32
    assert abs(many.mean()) < 0.02
    assert abs(many.std() - 1.0) < 0.02
    assert len(np.unique(many[:, 0, 0])) == 500
    np.testing.assert_array_equal(many[3], action_noise(0, 3, 10, 8))


def test_checkpoint_serves_its_ema_weights(
    run: RunConfig, stats: NormStats, checkpoint: Path, samples: list[dict[str, Any]]
):
    served = Policy.from_checkpoint(checkpoint, num_steps=4)
    tokenizer = load_tokenizer(run.data.tokenizer)
    expected = Policy(run, random_model(run, 2), stats, tokenizer, num_steps=4).infer(samples[1])
    np.testing.assert_allclose(served.infer(samples[1]), expected, atol=1e-6)


def test_untrained_policy_has_the_runs_initial_weights(
    run: RunConfig, stats: NormStats, checkpoint: Path, samples: list[dict[str, Any]]
):
    untrained = Policy.from_checkpoint(checkpoint, untrained=True)
    initial = Pi0.build(run.model, device="cpu", seed=run.train.seed)
    for name, parameter in untrained.model.named_parameters():
        assert torch.equal(parameter, initial.get_parameter(name)), name
    assert np.isfinite(untrained.infer(samples[0])).all()


def test_mistakes_are_explained(policy: Policy, checkpoint: Path, tmp_path: Path, samples: list[dict[str, Any]]):
    with pytest.raises(ValueError, match="state of a sample has shape"):
        policy.infer({**samples[0], "state": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="has no prompt"):
        policy.infer({**samples[0], "prompt": None})
    with pytest.raises(ValueError, match="images of"):
        policy.infer({**samples[0], "images": {"wrong_slot": samples[0]["images"]["base_0_rgb"]}})
    with pytest.raises(ValueError, match="3 samples but 1 noise"):
        policy.infer_batch(samples, numbers=[0])
    with pytest.raises(ValueError, match="at least 1 Euler step"):
        Policy(policy.run, policy.model, None, load_tokenizer(policy.run.data.tokenizer), num_steps=0)
    with pytest.raises(ValueError, match="cannot be used"):
        Policy.from_checkpoint(tmp_path)


def test_float32_on_the_device_it_is_told(run: RunConfig, stats: NormStats):
    model = Pi0.build(run.model, device="cpu", seed=0)
    policy = Policy(run, model, stats, load_tokenizer(run.data.tokenizer), torch.device("cpu"))
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert {p.device.type for p in policy.model.parameters()} == {"cpu"}
