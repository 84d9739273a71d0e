"""One node to N: volumes, times, the share that hides, and the parallelism that applies."""

from typing import Any

import pytest

from piston.model.cost import total_parameters
from piston.planning import formulas
from piston.planning.backtest import bands
from piston.planning.bottleneck import cores_needed
from piston.planning.bottleneck import section as bottleneck_section
from piston.planning.case import Case, payload, resolve
from piston.planning.figure import Figure
from piston.planning.request import Request
from piston.planning.scaling import network_share, node_counts, node_rate, rate_at, section


def prepared(**options: Any) -> tuple[Case, dict[str, Any]]:
    case = resolve(Request(**options))
    return case, payload(case)


def test_the_ring_moves_twice_all_but_one_share() -> None:
    assert formulas.ring_seconds(100.0, 2, 10.0) == 10.0
    assert formulas.ring_seconds(100.0, 1, 10.0) == 0.0
    assert formulas.ring_seconds(100.0, 1000, 10.0) == pytest.approx(20.0, rel=2e-3)


def test_node_counts_double_and_end_where_asked() -> None:
    assert node_counts(8) == [1, 2, 4, 8]
    assert node_counts(6) == [1, 2, 4, 6]
    assert node_counts(1) == [1]


def test_nodes_multiply_the_rate_at_the_published_share() -> None:
    case, costs = prepared()
    one = node_rate(case, costs, anchored=False)
    assert rate_at(case, costs, 1, 0.9, anchored=False) == one
    assert rate_at(case, costs, 4, 0.9, anchored=False) == pytest.approx(3.6 * one)


def test_the_network_costs_more_without_overlap_and_with_slow_ports() -> None:
    case, costs = prepared()
    hidden = network_share(case, costs, 8, anchored=False, overlap=1.0)
    exposed = network_share(case, costs, 8, anchored=False, overlap=0.0)
    slow, costs_slow = prepared(network_gbs=1.0)
    assert hidden == 1.0
    assert network_share(slow, costs_slow, 8, anchored=False, overlap=0.0) < exposed < 1.0


def test_the_table_moves_the_gradients() -> None:
    case, costs = prepared()
    row = section(case, costs, 1e8, bands(), anchored=False).tables[0].rows[1]
    assert isinstance(row[3], Figure)
    assert row[3].number == pytest.approx(2 * 0.5 * 4 * (total_parameters(case.model) - 109_056_000) / 1e9, rel=1e-3)


def test_a_gpu_without_a_usual_network_is_not_given_one() -> None:
    case, costs = prepared(gpu="RTX 5090", sharding="fsdp")
    found = section(case, costs, 1e8, bands(), anchored=False)
    assert found.figures["network per GPU"].kind == "not reported"
    assert found.tables[0].rows[1][4] == "network not given"


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"gpu": "H200"}, "Data parallel"),
        ({"gpu": "L40S", "batch": 64}, "HSDP"),
        ({"gpu": "RTX 4090", "gpus": 8, "nodes": 8, "batch": 64}, "HSDP"),
        ({"gpu": "RTX 4090", "gpus": 1, "batch": 8}, "Nothing fits"),
    ],
)
def test_which_parallelism_applies_and_why(options: dict[str, Any], start: str) -> None:
    case, costs = prepared(**options)
    assert section(case, costs, 1e8, bands(), anchored=False).notes[0].startswith(start)


def test_decode_binds_when_the_cores_are_few() -> None:
    case, costs = prepared(cores=1)
    stages = {r[0]: r for r in bottleneck_section(case, costs, anchored=False).tables[0].rows}
    assert stages["decode"][3] != "hidden behind the step"
    needed = cores_needed(case, costs, anchored=False).number
    enough, costs_enough = prepared(cores=int(needed) + 5)
    one, _ = prepared()
    assert node_rate(case, costs, anchored=False) < node_rate(enough, costs_enough, anchored=False)
    assert node_rate(enough, costs_enough, anchored=False) == pytest.approx(node_rate(one, costs, anchored=False))
