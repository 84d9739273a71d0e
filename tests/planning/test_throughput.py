"""Step times from anchors and from first principles; every way an anchors file can be wrong."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from piston.planning import published
from piston.planning.throughput import (
    SCHEMA,
    Anchor,
    fit,
    published_efficiency,
    reached,
    read_anchors,
    student_t,
)


def points(
    slope: float, overhead: float, batches: tuple[int, ...], noise: float = 0.0, seed: int = 0
) -> tuple[Anchor, ...]:
    draw = random.Random(seed)
    return tuple(Anchor(b, slope * b + overhead + draw.gauss(0, noise)) for b in batches)


def test_one_anchor_is_split_by_its_compute() -> None:
    found = fit((Anchor(64, 0.48, 0.23),))
    assert (found.slope, found.overhead) == (0.23 / 64, pytest.approx(0.25))
    assert found.wall_error(2048) is None


def test_two_batches_are_met_exactly() -> None:
    found = fit(points(0.004, 0.3, (64, 512)))
    assert found.slope == pytest.approx(0.004)
    assert found.overhead == pytest.approx(0.3)
    assert found.slope_error is None


def test_many_points_give_least_squares_with_intervals() -> None:
    import numpy as np

    batches = (64, 128, 256, 512, 1024)
    data = points(0.004, 0.3, batches, noise=0.02)
    found = fit(data)
    slope, overhead = np.polyfit([p.batch for p in data], [p.wall_s for p in data], 1)
    assert found.slope == pytest.approx(float(slope))
    assert found.overhead == pytest.approx(float(overhead))
    assert found.slope_error is not None
    far, near = found.wall_error(4096), found.wall_error(400)
    assert far is not None
    assert near is not None
    assert far > near > 0


def test_intervals_cover_the_truth_nineteen_times_in_twenty() -> None:
    hits = 0
    for seed in range(400):
        found = fit(points(0.004, 0.3, (64, 128, 256, 512, 1024), noise=0.05, seed=seed))
        error = found.wall_error(2048)
        assert error is not None
        hits += abs(found.wall(2048) - (0.004 * 2048 + 0.3)) <= error
    assert 0.92 <= hits / 400 <= 0.98


def test_a_curve_joins_only_when_the_points_show_one() -> None:
    batches = (64, 128, 256, 512, 1024, 2048)
    straight = fit(points(0.004, 0.3, batches, noise=0.01))
    bent = fit(tuple(Anchor(b, 0.004 * b + 0.3 + 2e-6 * b * b) for b in batches))
    assert straight.curve == 0.0
    assert bent.curve == pytest.approx(2e-6)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042)])
def test_student_t(freedom: int, value: float) -> None:
    assert student_t(freedom) == pytest.approx(value, abs=1e-3)


def test_published_efficiencies_are_recomputed_from_rates() -> None:
    """MFU of the performance notes: 48 % of 989 for the 278/s ceiling at 3/200/50 counts 13.73 TFLOP per sample."""
    openpi = next(r for r in published.RATES if r.system == "openpi")
    found = reached(openpi)
    assert found is not None
    assert openpi.per_gpu == pytest.approx(18.5, abs=0.05)
    assert found == pytest.approx(openpi.per_gpu * 17.3e12 / 989e12, rel=0.02)
    assert reached(next(r for r in published.RATES if r.gpu is None)) is None


def test_leaving_a_system_out_changes_the_median() -> None:
    everyone, fewer = published_efficiency(), published_efficiency(without="sizing note")
    assert everyone.low < everyone.value < everyone.high
    assert fewer.high < everyone.high


GOOD = {
    "schema": SCHEMA, "gpu": "H200", "gpus": 8, "cameras": 3, "text": 200, "horizon": 50,
    "points": [{"batch": 64, "wall_s": 0.48, "compute_s": 0.23}],
}  # fmt: skip


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "anchors.json"
    path.write_text(json.dumps(GOOD | changes))
    return path


def test_reads_a_good_file(tmp_path: Path) -> None:
    found = read_anchors(write(tmp_path))
    assert found.points == (Anchor(64, 0.48, 0.23),)
    assert (found.gpu, found.gpus) == ("H200", 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, "schema 'other'"),
        ({"gpuz": 1}, "unknown fields .*gpuz"),
        ({"gpu": "H20O"}, "did you mean 'H20'"),
        ({"gpus": 0}, "`gpus` is 0"),
        ({"points": []}, "`points` is"),
        ({"points": [3]}, "points.0. is 3"),
        ({"points": [{"batch": 64}]}, "`wall_s` is None"),
        ({"points": [{"batch": 64, "wall_s": math.nan}]}, "points.0.: `wall_s` is nan"),
        ({"points": [{"batch": -1, "wall_s": 1.0}]}, "`batch` is -1"),
        ({"points": [{"batch": 6.5, "wall_s": 1.0}]}, "`batch` is 6.5"),
        ({"points": [{"batch": 64, "wall_s": 1.0, "walls": 2}]}, "unknown fields .*walls"),
        ({"points": [{"batch": 64, "wall_s": 0.2, "compute_s": 0.3}]}, "compute_s 0.3 above wall_s 0.2"),
        ({"points": [{"batch": 64, "wall_s": 0.2}, {"batch": 64, "wall_s": 0.2}]}, r"points\[1\] repeats points\[0\]"),
    ],
)
def test_a_wrong_file_says_where_and_what_to_do(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_anchors(write(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value) or "GPU" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read anchors"):
        read_anchors(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"not JSON: .* at line 1"):
        read_anchors(tmp_path / "broken.json")


def test_one_batch_without_compute_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="a slope and an overhead cannot be told apart"):
        fit((Anchor(64, 0.48), Anchor(64, 0.49)))


def test_a_falling_step_time_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot get faster with more samples"):
        fit((Anchor(64, 1.0), Anchor(128, 0.5)))
