"""Runs the real model on a bundle's set and hands back everything it computed, under the bundle's names."""

import re
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from piston.batch import Observation
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0, time_embedding
from piston.model.weights import from_openpi_jax, to_openpi_jax
from piston.train.optim import total_norm
from piston.verify.bundle import Arrays, Dtype, ModelSet

Results = dict[str, np.ndarray]


def load_model(model_set: ModelSet, dtype: Dtype, device: str, params: torch.dtype = torch.float32) -> Pi0:
    """The set's model with its parameters; `params` float64 makes everything float64 (the referee)."""
    config = model_set.config(dtype)
    model = Pi0(config)
    model.load_state_dict(from_openpi_jax(config, model_set.params))
    model = model.to(device=device, dtype=params)
    if params == torch.float64:
        model.siglip.dtype = model.gemma.dtype = torch.float64
    return model


def numpy(tensor: Tensor) -> np.ndarray:
    """On the host; bfloat16 as float32 (exact)."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _placed(model_set: ModelSet, device: str, params: torch.dtype) -> tuple[Observation, Callable[[Tensor], Tensor]]:
    """The set's observation on the device, and the function that puts any tensor there (float64 for the referee)."""

    def place(tensor: Tensor) -> Tensor:
        double = params == torch.float64 and tensor.is_floating_point()
        return tensor.to(device=device, dtype=params if double else tensor.dtype)

    return Observation(**{k: place(v) for k, v in vars(model_set.observation()).items()}), place


def same_shape(name: str, ours: np.ndarray, reference: Arrays) -> None:
    """Raises ValueError if the bundle's array has another shape than the model computes."""
    if reference[name].shape != ours.shape:
        raise ValueError(
            f"array {name!r} of bundle file {getattr(reference, 'source', '?')} has shape {reference[name].shape}, the "
            f"model of its architecture computes {ours.shape}; correct `arch` in MANIFEST.json or record it again"
        )


def time_posemb_of_one(model: Pi0, time: Tensor) -> Tensor | None:
    """The time embedding of a whole batch of one sample, rounded as XLA rounds it there; None for other batches.

    Not the model's own rule, since to the model one sample may be a micro-batch of a larger batch.
    """
    return time_embedding(time, model.config.action_expert.width, alone=True) if time.shape[0] == 1 else None


def forward_and_gradient(
    model_set: ModelSet,
    model: Pi0,
    device: str,
    *,
    time_posemb: np.ndarray | None = None,
    gradient: bool = True,
) -> Results:
    """Every tap of the training loss and, as `grads/<jax path>`, every parameter's gradient (zero where none came)."""
    params = next(model.parameters()).dtype
    observation, place = _placed(model_set, device, params)
    actions, noise, time = (place(model_set.tensor(n)) for n in ("actions", "noise", "time"))
    posemb = time_posemb_of_one(model, time) if time_posemb is None else place(torch.from_numpy(time_posemb))
    tap: dict[str, Tensor] = {}
    with torch.set_grad_enabled(gradient):
        loss = flow_loss(model, observation, actions, noise, time, tap, posemb).mean()
    results = {name: numpy(value) for name, value in tap.items()}
    if gradient:
        model.zero_grad(set_to_none=True)
        loss.backward()
        named = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        results["grad_global_norm"] = numpy(total_norm(named.values()))
        results.update({f"grads/{k}": numpy(v) for k, v in to_openpi_jax(model.config, named).items()})
        model.zero_grad(set_to_none=True)
    return results


def sampling(model_set: ModelSet, model: Pi0, device: str, wanted: Iterable[str]) -> Results:
    """Every `sample/*` array that the bundle has; `sample/actions_num_steps<k>` with k Euler steps."""
    observation, place = _placed(model_set, device, next(model.parameters()).dtype)
    noise = place(model_set.tensor("sample_noise"))
    tap: dict[str, Tensor] = {}
    model.sample_actions(observation, noise, tap=tap)
    results = {name: numpy(value) for name, value in tap.items()}
    for name in wanted:
        if match := re.fullmatch(r"sample/actions_num_steps(\d+)", name):
            results[name] = numpy(model.sample_actions(observation, noise, num_steps=int(match.group(1))))
    return results
