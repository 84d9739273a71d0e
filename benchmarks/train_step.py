"""Speed of one training step of a recipe's model on random data: forward, backward, update; no loader.

    python benchmarks/train_step.py --recipe pi05_libero --batch-size 32 --device cuda
    python benchmarks/train_step.py --recipe demo --batch-size 64 --device cpu

Prints medians and writes one JSON line with hardware and versions, since a speed without them cannot be repeated.
"""

import dataclasses
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import tyro

from piston.batch import Observation
from piston.config.recipes import recipe
from piston.config.schema import ModelConfig
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0
from piston.train.optim import Optimizer


def random_inputs(config: ModelConfig, batch: int, device: torch.device):
    """An observation with every camera present and prompts filled to the end, actions, noise and time."""
    g = torch.Generator().manual_seed(0)
    height, width = config.image_size
    length = config.max_token_len
    observation = Observation(
        images=torch.rand((batch, len(config.cameras), height, width, 3), generator=g) * 2 - 1,
        image_masks=torch.ones(batch, len(config.cameras), dtype=torch.bool),
        state=torch.randn((batch, config.action_dim), generator=g),
        tokenized_prompt=torch.randint(0, config.vocab_size, (batch, length), generator=g, dtype=torch.int32),
        tokenized_prompt_mask=torch.ones(batch, length, dtype=torch.bool),
    )
    observation = Observation(**{k: v.to(device) for k, v in vars(observation).items()})
    shape = (batch, config.action_horizon, config.action_dim)
    actions, noise = (torch.randn(shape, generator=g).to(device) for _ in range(2))
    return observation, actions, noise, torch.rand(batch, generator=g).to(device)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    recipe: str
    batch_size: int
    device: str = "cpu"
    steps: int = 10
    warmup: int = 3
    json: Path | None = None


def main(options: Options) -> None:
    """Times `steps` steps after `warmup` and reports the median stage times."""
    run, device = recipe(options.recipe), torch.device(options.device)
    model = Pi0.build(run.model, device=device, seed=0)
    optimizer = Optimizer(dict(model.named_parameters()), run.optim)
    inputs = random_inputs(run.model, options.batch_size, device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    stages: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
    for step in range(options.warmup + options.steps):
        marks = [now()]
        loss = flow_loss(model, *inputs).mean()
        marks.append(now())
        loss.backward()
        marks.append(now())
        optimizer.update()
        marks.append(now())
        if step >= options.warmup:
            for name, a, b in zip(stages, marks, marks[1:], strict=False):
                stages[name].append(b - a)
    medians = {name: statistics.median(values) for name, values in stages.items()}
    total = sum(medians.values())
    cuda = device.type == "cuda"
    result = {
        "recipe": options.recipe,
        "batch_size": options.batch_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": medians,
        "samples_per_second": options.batch_size / total,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "loss": float(loss),
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    text = json.dumps(result)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
