"""Seed 2's figures, recomputed from its inputs: every row of its table, and what does not follow from them."""

import pytest

from piston.planning import formulas, seed2
from piston.planning.bottleneck import section as bottleneck_section
from piston.planning.case import Case, payload, resolve
from piston.planning.figure import Figure
from piston.planning.plan import Plan, make_plan
from piston.planning.request import Request
from piston.planning.seed_report import node_rate, rows
from piston.planning.throughput import fit


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Request(subject="seed2"))


@pytest.fixture(scope="module")
def case() -> Case:
    return resolve(Request(subject="seed2"))


def computed(key: str) -> float | int:
    return next(row.value for row in rows() if row.key == key)


def test_throughput_fit() -> None:
    found = fit((seed2.ANCHOR,))
    assert found.slope == pytest.approx(0.00359, abs=5e-6)
    assert found.overhead == pytest.approx(0.25)


@pytest.mark.parametrize(("batch", "rate"), [(64, 133.4), (1024, 260.8), (2048, 269.4)])
def test_frames_per_second(batch: int, rate: float) -> None:
    assert node_rate(batch) == pytest.approx(rate, rel=0.0015)


def test_ceiling() -> None:
    assert computed("ceiling") == pytest.approx(278.6, rel=0.0015)


@pytest.mark.parametrize(
    ("key", "value", "relative"),
    [
        ("fixed memory", 39, 0.01),
        ("memory at 256 per GPU", 65, 0.01),
        ("largest per GPU in 112 GB", 730, 0.001),
        ("timesteps at 1024", 0.717e9, 0.001),
        ("timesteps at 2048", 1.434e9, 0.001),
        ("episodes at 1024", 7.96e6, 0.001),
        ("episodes at 2048", 15.93e6, 0.001),
        ("hours at 1024", 6637, 0.0002),
        ("hours at 2048", 13274, 0.0002),
        ("native rate", 6.15, 0.001),
        ("native storage at 1024", 40.8, 0.001),
        ("native storage at 2048", 81.6, 0.001),
        ("re-encoded storage at 1024", 14.1, 0.003),
        ("re-encoded storage at 2048", 28.3, 0.002),
        ("MB per episode", 5, 0.03),
        ("shrink", 2.9, 0.01),
        ("days on one node at 1024", 30.8, 0.002),
        ("days on one node at 2048", 61.6, 0.002),
        ("steps of 2048 at 1024", 350_000, 0),
        ("steps of 2048 at 2048", 700_000, 0),
        ("days on 4 nodes at 1024, ideal", 7.7, 0.002),
        ("days on 4 nodes at 2048, ideal", 15.4, 0.002),
        ("days on 4 nodes at 1024, 90 %", 8.6, 0.005),
        ("days on 4 nodes at 2048, 90 %", 17.1, 0.003),
        ("π0 epochs at 1024", 0.8, 0.01),
    ],
)
def test_every_figure_of_the_note(key: str, value: float | int, relative: float | int) -> None:
    assert computed(key) == pytest.approx(value, rel=relative)


def test_two_and_eight_nodes_are_two_and_eight_times_faster() -> None:
    one = computed("days on one node at 2048")
    for nodes in (2, 4, 8):
        assert computed(f"days on {nodes} nodes at 2048, ideal") == pytest.approx(one / nodes)
        assert computed(f"days on {nodes} nodes at 2048, 90 %") == pytest.approx(one / nodes / 0.9)


def test_only_the_kilobytes_per_frame_do_not_follow() -> None:
    assert [row.key for row in rows() if not row.agrees] == ["kB per frame-set"]
    assert computed("kB per frame-set") == pytest.approx(73.9e9 / (12.02 * 3600 * 30) / 1e3)


def test_figures_lost_from_our_copy_are_not_made_up() -> None:
    unprinted = {row.key for row in rows() if row.said is None}
    assert "days on 8 nodes at 1024, ideal" in unprinted
    assert "days on 4 nodes at 1024, ideal" not in unprinted


def test_bottleneck_is_overhead_then_compute_and_not_data(case: Case) -> None:
    section = bottleneck_section(case, payload(case), anchored=True)
    assert section.notes[0].startswith("Binding at anchor at batch 64: host overhead (0.25 s of 0.48 s), then compute")
    verdicts = {row[0]: row[3] for row in section.tables[0].rows}
    assert verdicts["host overhead"] == "binding"
    assert verdicts["data loading (wait)"] == "hidden behind the step"


def lever(section_rows: tuple[tuple[Figure | str, ...], ...], start: str) -> float | int:
    row = next(r for r in section_rows if isinstance(r[0], str) and r[0].startswith(start))
    assert isinstance(row[1], Figure)
    return row[1].number


def test_levers(case: Case) -> None:
    table = bottleneck_section(case, payload(case), anchored=True).tables[1].rows
    assert lever(table, "batch 64 → 2048") == pytest.approx(2.0, abs=0.05)
    assert lever(table, "one node more") == 2
    assert lever(table, "data re-encoded") == pytest.approx(2.9, abs=0.03)
    assert 1.3 < lever(table, "3 → 2 cameras") < 1.4
    assert lever(table, "host overhead halved") < 1.05
    assert lever(table, "batch × 2") < 1.05  # "diminishing returns: < 5 %" holds here


def test_state_accounting_shows_the_hidden_policy(plan: Plan) -> None:
    section = next(s for s in plan.sections if s.key == "memory")
    assert section.figures["weights"].number + section.figures["moments"].number == pytest.approx(40.24, abs=0.01)
    assert section.figures["ema"].number == 0
    note = next(n for n in next(s for s in plan.sections if s.key == "seed2").notes if "39 GB" in n)
    assert "40.2 GB" in note
    assert "53.7 GB" in note
    assert "67.1 GB" in note


def test_margins(plan: Plan) -> None:
    figures = next(s for s in plan.sections if s.key == "seed2").figures
    rate, days = figures["frames/s at 2048"], figures["days on one node at 2048"]
    assert rate.low == pytest.approx(0.8 * rate.number)
    assert rate.high == pytest.approx(1.2 * rate.number)
    assert days.high == pytest.approx(1.5 * days.number)


def test_the_plan_of_the_note_gives_its_days(plan: Plan) -> None:
    assert plan.answer.days == pytest.approx(61.6, rel=0.002)
    assert plan.anchored
    four = make_plan(Request(subject="seed2", nodes=4, batch=8192))
    low, _, high = four.bands.scaling
    ideal = formulas.days(seed2.STEPS * 2048, 4 * node_rate(2048))
    assert ideal / high < four.answer.days < ideal / low
