"""A sample's costs are exactly quadratic in cameras, text and horizon: ten points give every other one."""

from typing import Any

import pytest

from piston.config.recipes import PI0, PI05
from piston.config.schema import ModelConfig
from piston.model import cost
from piston.planning import formulas
from piston.planning.activations import units
from piston.planning.coefficients import SUPPORT, flop_quadratics, quadratic_of, reshaped, unit_quadratics

SHAPES = [(3, 200, 50), (2, 24, 10), (1, 8, 1), (4, 256, 100)]


@pytest.mark.parametrize("config", [PI0, PI05], ids=["pi0", "pi05"])
@pytest.mark.parametrize("dead", ["skipped", "computed", "scanned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_flops_follow_the_quadratic_exactly(config: ModelConfig, dead: Any, shape: tuple[int, int, int]) -> None:
    found = flop_quadratics(config, dead)
    exact = cost.flops(reshaped(config, *shape), dead)
    assert formulas.quadratic(found["forward"], *shape) == exact.forward
    assert formulas.quadratic(found["backward"], *shape) == exact.backward
    again = cost.recompute(reshaped(config, *shape), dead, prefix_last=dead == "scanned")
    assert formulas.quadratic(found["recompute"], *shape) == again


@pytest.mark.parametrize("kernels", ["eager", "stock", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes_follow_the_quadratic_exactly(kernels: str, shape: tuple[int, int, int]) -> None:
    for unit, column in zip(units(reshaped(PI05, *shape)), unit_quadratics(PI05, kernels=kernels), strict=True):
        assert formulas.quadratic(column["saved"], *shape) == unit.saved(kernels)
        assert formulas.quadratic(column["inputs"], *shape) == unit.inputs
        assert column["parameters"] == unit.parameters


def test_a_cubic_cost_is_noticed() -> None:
    found = quadratic_of({point: point[0] ** 3 for point in SUPPORT})
    assert formulas.quadratic(found, 5, 1, 1) != 125
