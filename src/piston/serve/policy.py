"""A trained checkpoint as a function: what the robot sees and is told → the actions it should take.

The transforms are those of training, with their inverses; the weights are the EMA weights where the run kept an EMA.
The noise that an action chunk is made from is a pure function of (seed, number), so the same observation, seed and
number give the same actions, alone or in a batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from piston.batch import Observation
from piston.config.schema import RunConfig
from piston.data.augment import to_unit_range
from piston.data.norm import NormStats, load_norm_stats
from piston.data.prompt import Tokenizer, load_tokenizer
from piston.data.transforms import input_transform, output_transform
from piston.model.pi0 import Pi0
from piston.train.checkpoint import NORM_STATS, RUN, load_policy_weights, open_checkpoint
from piston.train.freeze import freeze

RawSample = dict[str, Any]  # {"images": {slot: uint8 [h, w, 3]}, "state": [state_dim], "prompt": text or None}


def action_noise(seed: int, number: int, horizon: int, action_dim: int) -> Float[np.ndarray, "A D"]:
    """The standard normal numbers, float32, that action chunk `number` of the stream `seed` starts from."""
    generator = np.random.Generator(np.random.Philox(key=[seed, number]))
    return generator.standard_normal((horizon, action_dim), dtype=np.float32)


class Policy:
    """A model with everything that its inputs and outputs need."""

    def __init__(
        self,
        run: RunConfig,
        model: Pi0,
        stats: NormStats | None,
        tokenizer: Tokenizer,
        device: torch.device | str = "cpu",
        *,
        num_steps: int = 10,
    ) -> None:
        """`num_steps`: Euler steps from noise to actions. `stats` None: the run's numbers are not normalised."""
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; sampling needs at least 1 Euler step (openpi takes 10)")
        self.run, self.device, self.num_steps = run, torch.device(device), num_steps
        self.model = model.to(self.device).eval()
        self._inputs, self._outputs = input_transform(run, stats, tokenizer), output_transform(run, stats)

    @classmethod
    def from_checkpoint(
        cls, path: Path, device: torch.device | str = "cpu", *, untrained: bool = False, num_steps: int = 10
    ) -> "Policy":
        """The policy of a checkpoint directory, which holds statistics and tokenizer too. Hashes are checked.

        `untrained` takes everything but the weights: those are the run's initial ones, to compare with. Raises
        ValueError if the checkpoint isn't whole.
        """
        checkpoint = open_checkpoint(path, files=(RUN, NORM_STATS))
        run = checkpoint.run
        model = Pi0.build(run.model, device=device, seed=run.train.seed)
        freeze(model)  # what training froze is bfloat16, here as there
        if not untrained:
            model.load_state_dict(load_policy_weights(path, device))
        stats = load_norm_stats(path / NORM_STATS)
        tokenizer = load_tokenizer(_tokenizer_file(path))
        return cls(run, model, stats, tokenizer, device, num_steps=num_steps)

    @property
    def horizon(self) -> int:
        """Actions in a chunk, A."""
        return self.run.model.action_horizon

    def infer(self, sample: RawSample, *, seed: int = 0, number: int = 0) -> Float[np.ndarray, "A d"]:
        """The action chunk for one observation: float32, in the robot's units and dimensions.

        A camera that is left out of `images` is taken as absent. Raises ValueError for a sample of the wrong shape.
        """
        return self.infer_batch([sample], seed=seed, numbers=[number])[0]

    @torch.inference_mode()
    def infer_batch(
        self, samples: Sequence[RawSample], *, seed: int = 0, numbers: Sequence[int] | None = None
    ) -> Float[np.ndarray, "B A d"]:
        """The action chunks of several observations at once; `numbers` (0, 1, …) choose each one's noise."""
        numbers = range(len(samples)) if numbers is None else numbers
        if len(numbers) != len(samples):
            raise ValueError(
                f"infer_batch got {len(samples)} samples but {len(numbers)} noise numbers; give one for each"
            )
        model = self.run.model
        ready = [self._inputs(sample) for sample in samples]
        noise = np.stack([action_noise(seed, number, model.action_horizon, model.action_dim) for number in numbers])
        actions = self.model.sample_actions(self._observation(ready), self._tensor(noise), self.num_steps)
        state = np.stack([sample["state"] for sample in ready])
        return self._outputs({"state": state, "actions": actions.float().cpu().numpy()})["actions"]

    def _observation(self, ready: list[dict[str, Any]]) -> Observation:
        stacked = {name: self._tensor(np.stack([sample[name] for sample in ready])) for name in ready[0]}
        return Observation(images=to_unit_range(stacked.pop("images")), **stacked)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _tokenizer_file(checkpoint: Path) -> Path:
    found = sorted(checkpoint.glob("tokenizer.*"))
    if len(found) != 1:
        raise ValueError(
            f"checkpoint {checkpoint} has {len(found)} tokenizer files, expected exactly one (tokenizer.model or "
            "tokenizer.json, which training writes): copy the one it was trained with into it"
        )
    return found[0]
