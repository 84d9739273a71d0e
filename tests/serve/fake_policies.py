"""Policies for tests: random weights that look at everything, and one that knows the simulator's truth."""

from collections.abc import Sequence

import numpy as np
import torch

from piston.config.schema import RunConfig
from piston.data.norm import KeyStats
from piston.demo.expert import ExpertConfig, expert_velocity
from piston.demo.planar_arm import PROMPTS, ArmConfig, PlanarArms, Scene
from piston.model.pi0 import Pi0
from piston.serve.policy import Policy, RawSample


def random_model(run: RunConfig, seed: int) -> Pi0:
    """The reference's initial model, with every zero-initialised part moved away from zero."""
    model = Pi0.build(run.model, device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def between(low: list[float], high: list[float]) -> KeyStats:
    q01, q99 = np.array(low), np.array(high)
    return KeyStats(mean=(q01 + q99) / 2, std=(q99 - q01) / 4, q01=q01, q99=q99)


class Oracle(Policy):
    """Drives to the block that the prompt asks for, as long as it has the base camera."""

    def __init__(self, run: RunConfig, arm: ArmConfig, scenes: list[Scene]) -> None:
        self.run, self.arm, self.scenes = run, arm, scenes
        self.seen: list[RawSample] = []

    def infer_batch(
        self, samples: Sequence[RawSample], *, seed: int = 0, numbers: Sequence[int] | None = None
    ) -> np.ndarray:
        self.seen = list(samples)
        arms = PlanarArms(self.arm, self.scenes)
        arms.target_N = np.array([PROMPTS.index(sample["prompt"]) for sample in samples])
        arms.hand_N2 = np.stack([sample["state"][3:] for sample in samples]).astype(np.float64)
        chunk = []
        for _ in range(self.horizon):
            chunk.append(expert_velocity(arms, ExpertConfig()))
            arms.step(chunk[-1])
        blind = np.array(["base_0_rgb" not in sample["images"] for sample in samples])
        return np.where(blind[:, None, None], 0.0, np.stack(chunk, axis=1)).astype(np.float32)
