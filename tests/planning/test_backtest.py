"""The planner's errors against what was published, recomputed; and the bands that it prints from them."""

import json
from pathlib import Path

import pytest

from piston.planning.backtest import all_errors, bands, section, summary
from piston.planning.plan import make_plan
from piston.planning.request import Request


def test_memory_is_within_fifteen_percent_where_the_configuration_is_known() -> None:
    counted = [e for e in all_errors() if e.quantity == "memory" and e.counts]
    assert len(counted) >= 2
    for error in counted:
        assert error.relative is not None
        assert abs(error.relative) < 0.15, error.name


def test_requirements_and_unknown_settings_are_shown_and_do_not_count() -> None:
    rows = {e.name: e for e in all_errors() if e.quantity == "memory"}
    assert not rows["openpi README, full fine-tune"].counts
    assert rows["openpi README, full fine-tune"].remark.endswith("consistent")
    unknown = rows["RLinf + Baige, per-block units"]
    assert unknown.predicted is None
    assert "between" in unknown.remark


def test_scaling_is_recomputed_and_not_repeated() -> None:
    """5340 / (32 × 175.57) is 95.0 %, not the 91.2 % that its source states."""
    row = next(e for e in all_errors() if e.name.startswith("RLinf + Baige, 8"))
    assert row.published == pytest.approx(0.950, abs=0.001)
    assert "91.2%" in row.remark
    assert row.relative is not None
    assert abs(row.relative) < 0.05


def test_a_system_never_predicts_itself() -> None:
    from piston.planning.throughput import published_efficiency

    row = next(e for e in all_errors() if e.name == "LeRobot pi05, 32 per GPU")
    assert row.relative is not None
    assert row.relative > 1  # the others say more than twice what it reached
    assert published_efficiency(without="lerobot").low > published_efficiency().low


def test_other_architectures_are_not_compared() -> None:
    for error in all_errors():
        if error.name.startswith(("Octo", "OpenVLA")):
            assert error.predicted is None
            assert not error.counts


def test_bands_enclose_what_made_them() -> None:
    found = bands()
    for error in all_errors():
        if error.counts and error.predicted:
            low, high = {"throughput": found.rate, "memory": found.memory}.get(error.quantity, (0.0, 9.0))
            assert low * error.predicted <= error.published * 1.0001
            assert error.published <= high * error.predicted * 1.0001


def test_the_plan_prints_these_bands() -> None:
    plan = make_plan(Request())
    throughput = next(s for s in plan.sections if s.key == "throughput").figures["samples/s, first principles"]
    assert throughput.low == pytest.approx(throughput.number * bands().rate[0])
    assert throughput.high == pytest.approx(throughput.number * bands().rate[1])


def test_summary_is_median_and_worst() -> None:
    found = summary(all_errors())
    assert set(found) == {"throughput", "wall-clock", "memory", "scaling"}
    for median, worst, count in found.values():
        assert 0 <= median <= worst
        assert count >= 1


def test_the_guide_prints_these_errors() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    names = {"scaling": "scaling to 256 GPUs"}
    for quantity, (median, worst, _) in summary(all_errors()).items():
        row = f"| {names.get(quantity, quantity)} | {100 * median:.0f} % | {100 * worst:.0f} % |"
        assert row in guide, row


def test_a_folder_of_profiles_joins_in(tmp_path: Path) -> None:
    profile = {
        "schema": "piston.profile/1", "gpu": "H100", "gpus": 1, "batch": 32, "cameras": 3, "text": 200, "horizon": 10,
        "step_s": 2.0, "stages_s": {"forward": 0.7, "backward": 1.2},
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(profile))
    (tmp_path / "other.json").write_text(json.dumps({"schema": "something else"}))
    rows = section(tmp_path).tables[0].rows
    assert len(rows) == len(section().tables[0].rows) + 1
    with pytest.raises(ValueError, match="is no folder"):
        section(tmp_path / "missing")
