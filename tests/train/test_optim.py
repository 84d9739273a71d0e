"""Clip, AdamW, schedule and EMA against the formulas in float64, and against the reference's own numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from piston.config.schema import OptimConfig
from piston.train.optim import Optimizer, learning_rate, parameter_norm, total_norm

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = OptimConfig(warmup_steps=10, peak_lr=1e-3, decay_steps=60, decay_lr=1e-4)


@pytest.mark.parametrize(
    ("config", "steps", "golden", "bit_equal"),
    [
        (OptimConfig(), "steps", "lr", 0.98),
        (TINY, "tiny_steps", "tiny_lr", 0.98),
        (OptimConfig(schedule="rsqrt", peak_lr=5e-5), "steps", "rsqrt_lr", 0.98),
    ],
)
def test_learning_rate_is_the_references(config: OptimConfig, steps: str, golden: str, bit_equal: float) -> None:
    schedule = np.load(GOLDEN / "schedule.npz")
    ours = np.array([learning_rate(config, int(step)) for step in schedule[steps]])
    assert np.abs(ours / schedule[golden] - 1).max() < 2e-7
    assert (ours.astype(np.float32) == schedule[golden]).mean() > bit_equal


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(OptimConfig(warmup_steps=0, decay_steps=10, peak_lr=0.5), 0) == 0.5


def parameters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (7, 5), "a.bias": (7,), "unused": (3, 3), "scalar": ()}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


class Exact:
    """The same update in float64, written as the reference's chain: clip, Adam, weight decay, learning rate; EMA."""

    def __init__(self, values: dict[str, Tensor], config: OptimConfig) -> None:
        self.p = {k: v.detach().double() for k, v in values.items()}
        self.m = {k: torch.zeros_like(v) for k, v in self.p.items()}
        self.v = {k: torch.zeros_like(v) for k, v in self.p.items()}
        self.ema = dict(self.p)
        self.config, self.step = config, 0

    def update(self, gradients: dict[str, Tensor]) -> float:
        c, d = self.config, self.config.ema_decay
        g = {k: gradients.get(k, torch.zeros_like(v)).double() for k, v in self.p.items()}
        norm = float(torch.sqrt(torch.stack([x.square().sum() for x in g.values()]).sum()))
        count, rate = self.step + 1, learning_rate(c, self.step)
        for k, value in g.items():
            clipped = value if norm < c.clip_gradient_norm else value * c.clip_gradient_norm / norm
            self.m[k] = c.b1 * self.m[k] + (1 - c.b1) * clipped
            self.v[k] = c.b2 * self.v[k] + (1 - c.b2) * clipped**2
            adam = (self.m[k] / (1 - c.b1**count)) / (torch.sqrt(self.v[k] / (1 - c.b2**count)) + c.eps)
            self.p[k] = self.p[k] - rate * (adam + c.weight_decay * self.p[k])
            if d is not None:
                self.ema[k] = d * self.ema[k] + (1 - d) * self.p[k]
        self.step += 1
        return norm


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        OptimConfig(warmup_steps=0, peak_lr=0.02, decay_steps=40, weight_decay=0.3, eps=1e-3, ema_decay=0.7),
        OptimConfig(warmup_steps=3, peak_lr=0.02, decay_steps=40, clip_gradient_norm=3.0, ema_decay=None),
    ],
    ids=["defaults", "heavy decay", "clip and no EMA"],
)
def test_update_follows_the_formulas(config: OptimConfig) -> None:
    values = parameters()
    optimizer, exact = Optimizer(values, config), Exact(values, config)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for step in range(40):
        scale = 10.0 ** (step % 4 - 2)  # below and above the clip
        gradients = {k: torch.randn(v.shape, generator=generator) * scale for k, v in values.items() if k != "unused"}
        for k, gradient in gradients.items():
            values[k].grad = gradient.clone()
        expected = exact.update(gradients)
        norms.append(expected)
        assert float(optimizer.update()) == pytest.approx(expected, rel=1e-6)
        assert all(p.grad is None for p in values.values())
    assert min(norms) < config.clip_gradient_norm < max(norms)
    for k, p in values.items():
        assert (p.detach() - exact.p[k]).abs().max() < 2e-6, k
        assert (optimizer.m[k] - exact.m[k]).abs().max() < 1e-6, k
        assert (optimizer.v[k] - exact.v[k]).abs().max() < 1e-6, k
        if optimizer.ema is not None:
            assert (optimizer.ema[k] - exact.ema[k]).abs().max() < 2e-6, k
    assert optimizer.step == 40
    assert (optimizer.ema is None) == (config.ema_decay is None)


def test_a_norm_equal_to_the_threshold_is_not_changed() -> None:
    p = torch.zeros(2).requires_grad_()
    optimizer = Optimizer({"p": p}, OptimConfig(clip_gradient_norm=5.0))
    p.grad = torch.tensor([3.0, 4.0])
    assert float(optimizer.update()) == 5.0
    assert torch.equal(optimizer.m["p"], torch.tensor([3.0, 4.0]) * (1 - 0.9))


def test_a_parameter_that_loses_its_gradient_keeps_moving() -> None:
    values = {"p": torch.ones(3).requires_grad_(), "q": torch.ones(3).requires_grad_()}
    optimizer = Optimizer(values, TINY)
    for gradient in (torch.full((3,), 0.1), None):
        values["p"].grad = gradient
        values["q"].grad = torch.zeros(3) if gradient is None else gradient.clone()
        optimizer.update()
    assert torch.equal(values["p"], values["q"])
    assert torch.equal(optimizer.m["p"], optimizer.m["q"])


def test_non_finite_gradients_leave_weights_and_moments_alone() -> None:
    values = parameters()
    optimizer = Optimizer(values, TINY)
    before = {k: p.detach().clone() for k, p in values.items()}
    values["a.weight"].grad = torch.full((7, 5), float("nan"))
    values["a.bias"].grad = torch.ones(7)
    assert not optimizer.update().isfinite()
    for k, p in values.items():
        assert torch.equal(p, before[k])
        assert not optimizer.m[k].any()
    values["unused"].grad = torch.ones(3, 3)
    assert float(optimizer.update()) == 3.0
    assert all(p.isfinite().all() for p in values.values())


def test_frozen_parameters_are_left_alone_and_all_frozen_is_an_error() -> None:
    values = parameters()
    values["a.weight"].requires_grad_(False)
    assert "a.weight" not in Optimizer(values, TINY).m
    with pytest.raises(ValueError, match="none of the 4 parameters"):
        Optimizer({k: v.detach() for k, v in values.items()}, TINY)


def test_ema_weights_are_swapped_in_and_out() -> None:
    values = parameters()
    optimizer = Optimizer(values, TINY)
    values["scalar"].grad = torch.ones(())
    optimizer.update()
    assert optimizer.ema is not None
    raw, average = values["scalar"].item(), optimizer.ema["scalar"].item()
    assert raw != average
    with optimizer.ema_weights():
        assert (values["scalar"].item(), optimizer.ema["scalar"].item()) == (average, raw)
    assert (values["scalar"].item(), optimizer.ema["scalar"].item()) == (raw, average)


def test_parameter_norm_counts_kernels_only() -> None:
    values = {"w": torch.full((2, 2), 2.0), "bias": torch.ones(9), "siglip.pos_embedding": torch.ones(4, 4)}
    assert float(parameter_norm(values)) == 4.0


class NoHostSync(TorchDispatchMode):
    """Fails on any operation that makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_update_never_waits_for_the_device() -> None:
    values = parameters()
    optimizer = Optimizer(values, TINY)
    values["a.weight"].grad = torch.ones(7, 5)
    with NoHostSync():
        optimizer.update()
        parameter_norm(values)
    with NoHostSync(), pytest.raises(AssertionError):
        values["scalar"].item()


def test_the_norm_of_a_large_layer_is_right() -> None:
    """torch's own float32 norm on a CPU adds squares one after the other and comes out too small."""
    weights = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    exact = float(weights.double().norm())
    assert abs(float(total_norm([weights])) / exact - 1) < 1e-6
    assert abs(float(total_norm([weights, weights])) / (exact * 2**0.5) - 1) < 1e-6
    rounded = weights.bfloat16()
    assert abs(float(parameter_norm({"kernel": rounded})) / float(rounded.double().norm()) - 1) < 1e-6
