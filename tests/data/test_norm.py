"""Normalisation equals openpi's to the bit, comes back, and norm_stats.json is openpi's or an error that helps."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.config.recipes import recipe
from piston.config.schema import RunConfig
from piston.data.norm import (
    KeyStats,
    check_norm_stats,
    load_for_run,
    load_norm_stats,
    norm_stats_path,
    normalize,
    save_norm_stats,
    unnormalize,
)

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden" / "preprocess_transforms.npz"))
STATS = {
    key: KeyStats(*(GOLDEN[f"stats/{key}/{name}"] for name in ("mean", "std", "q01", "q99")))
    for key in ("state", "actions")
}
MODES = {"zscore": False, "quantile": True}


@pytest.mark.parametrize("key", ["state", "actions"])
@pytest.mark.parametrize("mode", MODES)
def test_normalize_equals_openpi(key: str, mode: str) -> None:
    result = normalize(GOLDEN[f"norm_in/{key}"], STATS[key], use_quantiles=MODES[mode])
    assert result.dtype == np.float64
    assert np.array_equal(result, GOLDEN[f"normalize_{mode}/{key}"])


@pytest.mark.parametrize("key", ["state", "actions"])
@pytest.mark.parametrize("mode", MODES)
def test_unnormalize_equals_openpi(key: str, mode: str) -> None:
    result = unnormalize(GOLDEN[f"unnorm_in_{mode}/{key}"], STATS[key], use_quantiles=MODES[mode])
    assert np.array_equal(result, GOLDEN[f"unnormalize_{mode}/{key}"])


@pytest.mark.parametrize("mode", MODES)
def test_unnormalize_of_the_same_width_equals_openpi(mode: str) -> None:
    actions = GOLDEN[f"unnorm_in_{mode}/actions"][:, :7]
    result = unnormalize(actions, STATS["actions"], use_quantiles=MODES[mode])
    assert np.array_equal(result, GOLDEN[f"unnormalize_same_width_{mode}/actions"])


@st.composite
def stats_and_values(draw: st.DrawFn) -> tuple[KeyStats, np.ndarray]:
    stats_dim, dim = draw(st.integers(1, 8)), draw(st.integers(1, 10))
    numbers = hnp.arrays(np.float64, stats_dim, elements=st.floats(-100, 100))
    widths = hnp.arrays(np.float64, stats_dim, elements=st.floats(0, 100))  # 0: a constant dimension
    q01 = draw(numbers)
    stats = KeyStats(draw(numbers), draw(widths), q01, q01 + draw(widths))
    return stats, draw(hnp.arrays(np.float32, (2, dim), elements=st.floats(-1000, 1000, width=32)))


@given(case=stats_and_values(), use_quantiles=st.booleans())
def test_normalisation_comes_back(case: tuple[KeyStats, np.ndarray], use_quantiles: bool) -> None:
    stats, x = case
    x = x[:, : len(stats.mean)]
    there = normalize(x, stats, use_quantiles=use_quantiles)
    assert np.isfinite(there).all()
    np.testing.assert_allclose(unnormalize(there, stats, use_quantiles=use_quantiles), x, rtol=1e-9, atol=1e-6)


@given(stats_and_values())
def test_padded_dimensions_pass_through(case: tuple[KeyStats, np.ndarray]) -> None:
    stats, x = case
    extra = x[:, len(stats.mean) :].astype(np.float64)
    assert np.array_equal(unnormalize(x, stats, use_quantiles=True)[:, len(stats.mean) :], extra)
    np.testing.assert_allclose(unnormalize(x, stats, use_quantiles=False)[:, len(stats.mean) :], extra, rtol=2e-6)


def test_file_is_openpis(tmp_path: Path) -> None:
    path = tmp_path / "assets" / "recipe" / "set" / "norm_stats.json"
    stats = {"state": STATS["state"], "actions": KeyStats(np.zeros(2), np.ones(2))}
    save_norm_stats(path, stats)
    content = json.loads(path.read_text())
    assert list(content) == ["norm_stats"]
    assert list(content["norm_stats"]) == ["state", "actions"]
    assert list(content["norm_stats"]["state"]) == ["mean", "std", "q01", "q99"]
    assert content["norm_stats"]["state"]["q01"] == GOLDEN["stats/state/q01"].tolist()
    assert content["norm_stats"]["actions"]["q01"] is None
    assert [file.name for file in path.parent.iterdir()] == ["norm_stats.json"]
    for again in (load_norm_stats(path), load_norm_stats(path.parent)):
        assert again["actions"].q99 is None
        for name in ("mean", "std", "q01", "q99"):
            assert np.array_equal(getattr(again["state"], name), getattr(STATS["state"], name))


def test_statistics_with_nan_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_norm_stats(tmp_path / "norm_stats.json", {"state": KeyStats(np.array([np.nan]), np.ones(1))})
    assert not list(tmp_path.iterdir())


def run_with(path: Path | None) -> RunConfig:
    run = recipe("pi05_libero")
    return dataclasses.replace(run, data=dataclasses.replace(run.data, norm_stats=path, root=Path("/data/libero")))


def test_path_comes_from_recipe_and_data_set() -> None:
    assert norm_stats_path(run_with(None)) == Path("assets/pi05_libero/physical-intelligence/libero/norm_stats.json")
    assert norm_stats_path(run_with(Path("here.json"))) == Path("here.json")


def test_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not exist") as caught:
        load_for_run(run_with(tmp_path / "norm_stats.json"))
    message = str(caught.value)
    assert str(tmp_path / "norm_stats.json") in message
    assert "piston data stats /data/libero --recipe pi05_libero" in message
    assert "--data.norm-stats" in message


GOOD = {"mean": [0.0, 1.0], "std": [1.0, 1.0], "q01": [0.0, 0.0], "q99": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("not json", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"state": {}}', "norm_stats"),
        ('{"norm_stats": {"state": {"std": [1.0]}}}', "no mean"),
        ('{"norm_stats": {"state": {"mean": [["a"]], "std": [1.0]}}}', "cannot be read"),
        ('{"norm_stats": {"state": {"mean": [[1.0]], "std": [1.0]}}}', "shapes"),
        ('{"norm_stats": {"state": {"mean": [], "std": []}}}', "shapes"),
        (json.dumps({"norm_stats": {"state": GOOD | {"mean": [1.0]}}}), "different lengths"),
        (json.dumps({"norm_stats": {"state": GOOD | {"mean": [1.0, float("nan")]}}}), "mean [nan] in dimensions [1]"),
        (json.dumps({"norm_stats": {"state": GOOD | {"std": [-1.0, 1.0]}}}), "std [-1.0] in dimensions [0]"),
        (json.dumps({"norm_stats": {"state": GOOD | {"q99": [1.0, -1.0]}}}), "q99 [-1.0] in dimensions [1]"),
    ],
)
def test_broken_files_are_errors(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "norm_stats.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="piston data stats") as caught:
        load_norm_stats(path)
    assert found in str(caught.value)
    assert str(path) in str(caught.value)


def stats_of(state: int, actions: int) -> dict[str, KeyStats]:
    return {k: KeyStats(*(np.full(n, float(i)) for i in range(4))) for k, n in (("state", state), ("actions", actions))}


def test_statistics_must_fit_the_robot(caplog: pytest.LogCaptureFixture) -> None:
    run = run_with(None)
    check_norm_stats(stats_of(8, 7), run)
    check_norm_stats(stats_of(32, 32), run)  # as wide as the model: openpi's base checkpoints
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_norm_stats(stats_of(14, 14), run)
    assert "14 dimensions, robot libero has 8" in caplog.text
    with pytest.raises(ValueError, match=r"`actions` have 6 dimensions, robot libero has 7"):
        check_norm_stats(stats_of(8, 6), run)
    with pytest.raises(ValueError, match=r"no `actions`, only \['state'\]"):
        check_norm_stats({"state": stats_of(8, 7)["state"]}, run)


def test_quantile_recipes_need_quantiles() -> None:
    stats = {key: KeyStats(value.mean, value.std) for key, value in stats_of(8, 7).items()}
    check_norm_stats(stats, recipe("pi0_libero"))
    with pytest.raises(ValueError, match="no q01 and q99"):
        check_norm_stats(stats, recipe("pi05_libero"))


def test_a_place_that_cannot_be_written_is_explained_and_left_clean(tmp_path: Path) -> None:
    stats = {"state": KeyStats(np.zeros(1), np.ones(1))}
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder", tmp_path / "file" / "norm_stats.json"):
        with pytest.raises(ValueError, match=r"cannot be written to .*--out"):
            save_norm_stats(path, stats)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
