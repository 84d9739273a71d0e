"""Starting from other weights: a checkpoint of any layout into the model, all of it or all but an explicit list."""

import re

import torch
from rich.console import Console

from piston.config.schema import RunConfig
from piston.model.pi0 import Pi0
from piston.train.checkpoint import MANIFEST, open_checkpoint
from piston.train.freeze import GROUPS, group_of
from piston.weights.opened import Weights, missing_and_mismatched, open_weights


@torch.no_grad()
def load_initial(model: Pi0, run: RunConfig, console: Console) -> None:
    """Overwrites the model's parameters with those of `train.init`, but for the ones in `train.init_except`.

    As in openpi, LoRA adapters that the checkpoint lacks stay as initialised. Raises ValueError for parameters that are
    missing, unexpected or of another shape and not listed, naming them, and for a listed name that does not exist.
    """
    path = run.train.init
    assert path is not None, "nothing to start from"
    if (path / MANIFEST).is_file():
        open_checkpoint(path)  # hashes
    weights = open_weights(path, like=run.model)
    parameters = dict(model.named_parameters())
    listed = _listed(run.train.init_except, {*parameters, *weights.links})
    wrong = dict(missing_and_mismatched(weights, run.model))
    adapters = {name for name in wrong if ".lora." in name and name not in weights.links}
    problems = [problem for name, problem in wrong.items() if name not in listed | adapters]
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(
            f"{path} does not fit the model: {len(problems)} parameters differ; expected the same names and shapes:\n  "
            f"{listing}\nTrain a model of the same sizes, or list those that are to stay as initialised with "
            f"--train.init-except ({', '.join(GROUPS)}, or names as above)"
        )
    taken = [name for name in parameters if name not in listed | adapters]
    for name in sorted(taken, key=lambda name: _place(weights, name)):
        parameters[name].copy_(weights.read(name))
    console.print(
        f"started from {path} ({weights.layout}): {len(taken)} of {len(parameters)} parameters", highlight=False
    )
    fresh = sorted(name for name in parameters if name in listed | adapters)
    if fresh:
        names = ", ".join(_summary(fresh))
        console.print(f"as initialised: {len(fresh)} parameters: {names}", highlight=False, soft_wrap=True)
    left = sorted(name for name in weights.links if name in listed and name not in parameters)
    if left:
        console.print(f"in the checkpoint but not in the model: {', '.join(left)}", highlight=False, soft_wrap=True)


def _place(weights: Weights, name: str) -> tuple[str, int]:
    tensor, layer = weights.links[name].theirs[0]
    return tensor, layer or 0


def _listed(entries: tuple[str, ...], names: set[str]) -> set[str]:
    """The parameters that the entries name: a group, a parameter, or a module with everything in it."""
    found: set[str] = set()
    for entry in entries:
        matches = {name for name in names if entry == group_of(name) or name == entry or name.startswith(f"{entry}.")}
        if not matches:
            raise ValueError(
                f"train.init_except has {entry!r}, which names no parameter; expected {', '.join(GROUPS)}, or a name "
                "like action_in_proj or gemma.blocks.0.suffix.q.weight: correct it"
            )
        found |= matches
    return found


def _summary(names: list[str]) -> list[str]:
    """Names with layer numbers replaced by *, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
