"""Data volumes from a rate, and measured from a real data set's metadata and files."""

from pathlib import Path

import pytest

from piston.demo.record import DemoConfig, build
from piston.planning.case import resolve
from piston.planning.corpus import corpus_frames, measure, rates, section
from piston.planning.plan import make_plan
from piston.planning.request import Request


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus") / "arm"
    build(root, DemoConfig(episodes=3))
    return root


def test_a_data_set_is_measured_from_its_own_files(recorded: Path) -> None:
    import pyarrow.parquet as pq

    found = measure(recorded)
    assert found.episodes == 3
    assert found.frames == sum(pq.read_table(f).num_rows for f in (recorded / "data").rglob("*.parquet"))
    videos = sum(f.stat().st_size for f in recorded.rglob("*.mp4"))
    tables = sum(f.stat().st_size for f in (recorded / "data").rglob("*.parquet"))
    assert (found.video_bytes, found.bytes) == (videos, videos + tables)
    assert found.cameras == 2
    assert found.hours == pytest.approx(found.frames / found.fps / 3600)


def test_the_plan_uses_the_measured_set(recorded: Path) -> None:
    plan = make_plan(Request(data=recorded, epochs=2.0))
    figures = next(s for s in plan.sections if s.key == "corpus").figures
    assert figures["epochs over the corpus"].value == 2.0
    assert figures["corpus frames"].kind == "measured"
    assert figures["native rate"].kind == "measured"
    assert figures["native storage"].number * 1e12 == pytest.approx(2 * measure(recorded).bytes)


def test_hours_make_a_corpus() -> None:
    assert corpus_frames(Request(hours=10.0, fps=20.0), None) == 720_000
    assert corpus_frames(Request(), None) is None


def test_unknown_corpus_has_no_epochs() -> None:
    figures = section(resolve(Request()), 1e6, None).figures
    assert figures["epochs over the corpus"].kind == "not reported"
    assert figures["native rate"].kind == "quoted"


def test_your_rate_is_yours() -> None:
    native, small = rates(Request(gb_per_hour=3.0, gb_per_hour_small=1.0), None)
    assert (native.kind, native.value, small.value) == ("given", 3.0, 1.0)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        measure(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"info\.json"):
        measure(tmp_path)
