"""Given all but one of work, nodes, deadline and budget, the planner finds it, or says what it would need."""

import pytest

from piston.planning.request import Request
from piston.planning.target import Answer, solve, work_frames

RATE = 100.0  # samples per second of one node


def rate(nodes: int) -> float | int:
    return RATE * nodes * (0.9 if nodes > 1 else 1.0)


def answer(frames: float | None, **options: object) -> Answer:
    return solve(Request(**options), frames, rate, 8)  # pyright: ignore[reportArgumentType]


def test_work_alone_gives_days_on_one_node() -> None:
    found = answer(86_400 * RATE * 3)
    assert (found.days, found.nodes, found.solved) == (3.0, 1, "days")


def test_work_and_deadline_give_the_fewest_nodes() -> None:
    found = answer(86_400 * RATE * 10, days=3.0)
    assert found.solved == "nodes"
    assert found.nodes == 4  # 10 / (0.9 × 4) = 2.8; three would take 3.7
    assert found.days <= 3.0


def test_four_nodes_and_ten_days_give_the_work() -> None:
    found = answer(None, nodes=4, days=10.0)
    assert found.solved == "timesteps"
    assert found.frames == pytest.approx(10 * 86_400 * 360)


def test_budget_and_work_give_nodes_and_days() -> None:
    hours = 10 * 24 * 8
    found = answer(86_400 * RATE * 10, budget=hours * 2.0 * 1.2, price=2.0)
    assert found.nodes == 8  # 1 / 0.9 more GPU-hours are affordable
    tight = answer(86_400 * RATE * 10, budget=hours * 2.0 * 1.05, price=2.0)
    assert tight.nodes == 1


def test_budget_and_deadline_give_work() -> None:
    found = answer(None, budget=2 * 24 * 8 * 2.0 * 5, price=2.0, days=5.0)
    assert (found.nodes, found.solved) == (2, "timesteps")
    assert found.frames == pytest.approx(5 * 86_400 * 180)


def test_budget_alone_gives_work_on_one_node() -> None:
    assert answer(None, budget=24 * 8 * 3.0, price=3.0).days == pytest.approx(1.0)


def test_impossible_deadline_says_the_least() -> None:
    with pytest.raises(ValueError, match=r"even 4096 nodes need at least .* days"):
        answer(1e15, days=0.01)


def test_impossible_budget_says_the_least() -> None:
    with pytest.raises(ValueError, match=r"needs at least 1,920 GPU-hours, 3,840: .* reduce the work to"):
        answer(86_400 * RATE * 10, budget=10.0, price=2.0)


def test_budget_below_one_node_for_the_days() -> None:
    with pytest.raises(ValueError, match=r"does not pay one node .* needs at least 3,840"):
        answer(None, budget=100.0, price=2.0, days=10.0)


def test_work_comes_from_any_of_its_names() -> None:
    assert work_frames(Request(steps=1000), 256, None, 1) == 256_000
    assert work_frames(Request(timesteps=5e6), 256, None, 1) == 5e6
    assert work_frames(Request(epochs=2.0), 256, 1e6, 1) == 2e6
    assert work_frames(Request(), 256, None, 30_000) == 256 * 30_000
    assert work_frames(Request(days=2.0, nodes=2), 256, None, 30_000) is None


def test_epochs_need_a_corpus() -> None:
    with pytest.raises(ValueError, match="an epoch needs a length: give --data or --hours"):
        work_frames(Request(epochs=2.0), 256, None, 1)
