"""AdamW, gradient clip, learning-rate schedules and EMA with the reference's formulas, without a host sync.

Source: openpi training/optimizer.py through optax 0.2.4, scripts/train.py. Order: clip
by the global norm, Adam, decoupled weight decay, learning rate; then the EMA of the new parameters.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import get_total_norm

from piston.config.schema import OptimConfig

ROWS_ABOVE = 1 << 16  # entries; torch's float32 norm of as many is within 1e-6 on a CPU


def learning_rate(config: OptimConfig, step: int) -> float:
    """Learning rate of update number `step`, the first being 0.

    Linear warm-up from peak/(W+1) to peak, then a cosine to `decay_lr` at `decay_steps` (warm-up included), constant
    after it; or peak/√((τ + step − W)/τ). In float32 and in the reference's order of operations, whose warm-up rounds
    by as much as 1e-5 of the rate.
    """
    peak, warmup = np.float32(config.peak_lr), config.warmup_steps
    if step < warmup:
        start = config.peak_lr / (warmup + 1)
        remaining = np.float32(1) - np.float32(step) / np.float32(warmup)
        return float(np.float32(start - config.peak_lr) * remaining + peak)
    if config.schedule == "rsqrt":
        timescale = np.float32(config.timescale)
        return float(peak / np.sqrt((timescale + np.float32(step - warmup)) / timescale))
    span = config.decay_steps - warmup
    angle = np.float32(np.pi) * np.float32(min(step - warmup, span)) / np.float32(span)
    cosine = np.float32(0.5) * (np.float32(1) + np.float32(math.cos(angle)))
    floor = config.decay_lr / config.peak_lr
    return float(peak * (np.float32(1 - floor) * cosine + np.float32(floor)))


class Optimizer:
    """Owns Adam's moments and the EMA of named float32 parameters; parameters that need no gradient are left alone.

    `step` counts the updates done. `m`, `v`, `ema` are keyed by parameter name; `ema` is None where the config has no
    decay.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimConfig) -> None:
        self.config = config
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError(f"none of the {len(parameters)} parameters needs a gradient; there is nothing to train")
        values = {name: p.detach() for name, p in self.parameters.items()}
        self.m = {name: torch.zeros_like(p) for name, p in values.items()}
        self.v = {name: torch.zeros_like(p) for name, p in values.items()}
        self.ema = None if config.ema_decay is None else {name: p.clone() for name, p in values.items()}
        self.step = 0
        device = next(iter(values.values())).device
        self._count = torch.zeros((), dtype=torch.float32, device=device)  # updates done, for the bias correction
        self._zeros: Tensor | None = None

    @torch.no_grad()
    def update(self) -> Float[Tensor, ""]:
        """One step from the parameters' `.grad`, which are consumed; the norm before the clip, on the device.

        A parameter without a gradient counts as having a zero one. If the norm is not finite, parameters and moments
        stay as they are: the caller has to look at the norm and stop.
        """
        config, names = self.config, list(self.parameters)
        parameters = [p.detach() for p in self.parameters.values()]
        norm = self._gradient_norm()
        # ‖g‖ < c: leave; else g · c / ‖g‖, with no epsilon. The kernel divides gradients by the scale.
        scale = torch.where(norm < config.clip_gradient_norm, torch.ones_like(norm), norm / config.clip_gradient_norm)
        self._count.fill_(self.step + 1)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            parameters,
            [self._gradient(name) for name in names],
            list(self.m.values()),
            list(self.v.values()),
            [],
            [self._count] * len(names),
            lr=learning_rate(config, self.step),
            beta1=config.b1,
            beta2=config.b2,
            weight_decay=config.weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=(~norm.isfinite()).float(),
        )
        if self.ema is not None:
            assert config.ema_decay is not None
            averages = list(self.ema.values())
            torch._foreach_lerp_(averages, parameters, 1 - config.ema_decay)  # pyright: ignore[reportPrivateImportUsage]
        for p in self.parameters.values():
            p.grad = None
        self.step += 1
        return norm

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return torch.zeros_like(self._count)
        return total_norm(gradients)

    def _gradient(self, name: str) -> Tensor:
        """The parameter's gradient, or a view of one shared block of zeros."""
        parameter = self.parameters[name]
        if parameter.grad is not None:
            return parameter.grad
        if self._zeros is None or self._zeros.numel() < parameter.numel():
            self._zeros = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        return self._zeros[: parameter.numel()].view(parameter.shape)

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the parameters hold their averages; nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        assert self.ema is not None, "there is no EMA to swap in"
        for name, average in self.ema.items():
            parameter = self.parameters[name]
            parameter.data, self.ema[name] = average, parameter.data

    @torch.no_grad()
    def load(
        self, step: int, m: Mapping[str, Tensor], v: Mapping[str, Tensor], ema: Mapping[str, Tensor] | None
    ) -> None:
        """Goes on from the state after `step` updates. Raises ValueError, naming them, for tensors that do not fit."""
        pairs = [("m", self.m, m), ("v", self.v, v)]
        if (self.ema is None) != (ema is None):
            raise ValueError(
                f"EMA is {'off' if self.ema is None else 'on'} now but was not before; set optim.ema_decay back"
            )
        if self.ema is not None and ema is not None:
            pairs.append(("ema", self.ema, ema))
        for what, ours, theirs in pairs:
            wrong = sorted(
                n for n in {*ours, *theirs} if n not in ours or n not in theirs or ours[n].shape != theirs[n].shape
            )
            if wrong:
                raise ValueError(
                    f"{what} of {len(wrong)} parameters missing, unexpected or of another shape: {wrong[:10]}"
                )
            for name, tensor in theirs.items():
                ours[name].copy_(tensor)
        self.step = step


def total_norm(tensors: Iterable[Tensor]) -> Float[Tensor, ""]:
    """√ of the sum of all squares, at least float32.

    On a CPU large tensors are taken row by row: torch adds squares there one after the other, so that the norm of a
    layer of 67 million weights would come out 0.6 % too small.
    """
    return get_total_norm([_row_norms(t) if _by_rows(t) else t for t in tensors])


def _by_rows(t: Tensor) -> bool:
    return t.dtype == torch.bfloat16 or (t.device.type == "cpu" and t.numel() > ROWS_ABOVE)


def _row_norms(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t, dim=-1, dtype=torch.promote_types(t.dtype, torch.float32))


def parameter_norm(parameters: Mapping[str, Tensor]) -> Float[Tensor, ""]:
    """Norm of the kernels, on the device: what openpi logs as `param_norm` (scripts/train.py, train_step).

    Left out: vectors (biases, norm scales), position and token embeddings.
    """
    return total_norm(p.detach() for name, p in parameters.items() if p.ndim > 1 and not name.endswith("embedding"))
