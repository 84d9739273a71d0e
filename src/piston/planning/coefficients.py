"""Costs of a sample as exact quadratics in (cameras, text tokens, horizon), so that a slider needs no model code."""

import dataclasses
from collections.abc import Callable
from typing import Any

from piston.config.schema import ModelConfig
from piston.model.cost import Dead, dead_parameters, flops, recompute, total_parameters, trained_parameters
from piston.planning.activations import Unit, units

Point = tuple[int, int, int]
Quadratic = dict[str, int]


def _point(*raised: str) -> Point:
    c, t, h = (1 + raised.count(v) for v in "cth")
    return c, t, h


SUPPORT: tuple[Point, ...] = tuple(
    sorted({_point(), *(_point(v) for v in "cth"), *(_point(a, b) for a in "cth" for b in "cth")})
)


def reshaped(config: ModelConfig, cameras: int, text: int, horizon: int) -> ModelConfig:
    """The same network for other shapes of a sample."""
    names = tuple(f"camera_{i}" for i in range(cameras))
    return dataclasses.replace(config, cameras=names, max_token_len=text, action_horizon=horizon)


def quadratic_of(value: dict[Point, int]) -> Quadratic:
    """The quadratic through the values at SUPPORT. Coefficients are doubled, so that integer costs keep them whole."""
    at = value.__getitem__
    one = at(_point())
    result: Quadratic = {}
    for v in "cth":
        result[v + v] = at(_point(v, v)) - 2 * at(_point(v)) + one
    for a, b in ("ct", "ch", "th"):
        result[a + b] = 2 * (at(_point(a, b)) - at(_point(a)) - at(_point(b)) + one)
    for v in "cth":
        crossed = sum(result[pair] for pair in ("ct", "ch", "th") if v in pair)
        result[v] = 2 * (at(_point(v)) - one) - 3 * result[v + v] - crossed
    result["1"] = 2 * one - sum(result.values())
    return result


def _fit(config: ModelConfig, cost: Callable[[ModelConfig], int]) -> Quadratic:
    return quadratic_of({point: cost(reshaped(config, *point)) for point in SUPPORT})


def flop_quadratics(config: ModelConfig, dead: Dead) -> dict[str, Quadratic]:
    """Forward, backward and full checkpointing's recomputation, FLOPs per sample."""
    return {
        "forward": _fit(config, lambda c: flops(c, dead).forward),
        "backward": _fit(config, lambda c: flops(c, dead).backward),
        # XLA drops a recomputed block's final product as dead code; PyTorch stops early only where its code allows.
        "recompute": _fit(config, lambda c: recompute(c, dead, prefix_last=dead == "scanned")),
    }


def unit_quadratics(config: ModelConfig, *, kernels: str) -> list[dict[str, Any]]:
    """The blocks in forward order, as `formulas.memory` wants them."""
    by_point = {point: units(reshaped(config, *point)) for point in SUPPORT}
    trained = trained_parameters(config) / total_parameters(config)
    result = []
    for i, unit in enumerate(units(config)):

        def column(field: Callable[[Unit], int], i: int = i) -> Quadratic:
            return quadratic_of({point: field(by_point[point][i]) for point in SUPPORT})

        live = unit.parameters - (dead_parameters(config) if unit.name == "last joint block" else 0)
        result.append(
            {
                "name": unit.name,
                "count": unit.count,
                "parameters": unit.parameters,
                "trained": live if trained == 1 else live * trained,
                "casts": 0 if kernels == "xla" else unit.casts,
                "block": int("block" in unit.name),
                "inputs": column(lambda u: u.inputs),
                "saved": column(lambda u: u.saved(kernels)),
                "workspace": column(lambda u: u.working(kernels)),
                "fused": int(kernels == "xla"),  # a recomputed block's temporaries are never all alive
            }
        )
    return result
