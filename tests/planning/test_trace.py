"""Traced memory of the real model beside the analytic figures; what it cannot do yet, it says."""

import dataclasses
from typing import Any

import pytest

from piston.config.recipes import PI05, recipe
from piston.planning.case import payload, resolve
from piston.planning.coefficients import reshaped
from piston.planning.memory import usage
from piston.planning.request import Request
from piston.planning.trace import Traced, trace


def both(subject: str, batch: int, checkpointing: Any, **shape: Any) -> tuple[Traced, dict[str, float]]:
    case = resolve(Request(subject=subject, gpus=1, batch=batch, ema=False, checkpointing=checkpointing, **shape))
    found = trace(case.model, batch, checkpointing=checkpointing, ema=False)
    return found, usage(case, payload(case))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_small_model_agrees_with_the_formulas(checkpointing: Any) -> None:
    found, mine = both("debug_pi05", 8, checkpointing)
    assert mine["weights"] + mine["moments"] == found.state
    assert mine["forward_end"] == pytest.approx(found.forward_end, rel=0.02)
    assert mine["peak"] == pytest.approx(found.peak, rel=0.1)


def test_gradients_are_those_of_live_weights() -> None:
    found, mine = both("debug_cpu", 2, "none")
    assert mine["gradients"] == pytest.approx(found.gradients, rel=1e-3)


def test_checkpointing_and_batch_move_the_peak_the_right_way() -> None:
    config = dataclasses.replace(recipe("debug_cpu").model, dtype="bfloat16")
    plain = trace(config, 8, checkpointing="none", ema=False)
    assert trace(config, 8, checkpointing="full", ema=False).forward_end < plain.forward_end
    assert trace(config, 4, checkpointing="none", ema=False).peak < plain.peak
    assert trace(config, 8, checkpointing="none", ema=True).state > plain.state


def test_ranks_are_refused_until_the_model_can_be_sharded() -> None:
    with pytest.raises(ValueError, match=r"parallel room .* is not built yet"):
        trace(recipe("debug_pi05").model, 2, checkpointing="none", ema=False, ranks=8)


def test_tracing_leaves_no_fake_constants_behind() -> None:
    import torch

    from piston.model.attention import rope_angles
    from piston.model.pi0 import time_embedding

    config = dataclasses.replace(recipe("debug_cpu").model, dtype="bfloat16")
    trace(config, 2, checkpointing="none", ema=False)
    cos, _ = rope_angles(torch.arange(3, dtype=torch.int32)[None], config.paligemma.head_dim)
    assert float(cos[0, 0, 0, 0]) == 1.0
    assert float(time_embedding(torch.zeros(1), config.action_expert.width)[0, -1]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "batch", "checkpointing"),
    [((2, 200, 50), 32, "full"), ((3, 200, 50), 8, "none"), ((3, 200, 10), 32, "half")],
)
def test_full_size_model_agrees_with_the_formulas(shape: tuple[int, int, int], batch: int, checkpointing: Any) -> None:
    cameras, text, horizon = shape
    found, mine = both("pi05_libero", batch, checkpointing, cameras=cameras, text=text, horizon=horizon)
    assert found.seconds > 0
    assert reshaped(PI05, *shape).prefix_len == 256 * cameras + text
    assert mine["forward_end"] == pytest.approx(found.forward_end, rel=0.03)
    assert mine["peak"] == pytest.approx(found.peak, rel=0.03)
