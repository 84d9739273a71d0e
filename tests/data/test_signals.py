"""Every judgement on numbers and prompts: on a set that has the fault, and silence on one that has not."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_sets import TASKS, Spec, edit_table, make_set

from piston.config.recipes import recipe
from piston.data.doctor import check

TABLE = "data/chunk-000/file-000.parquet"
TASK_TABLE = "meta/tasks.parquet"
LENGTHS = (90, 110)
Numbers = np.ndarray
Fault = Callable[[Numbers, Numbers], None]  # changes state and action [n, 4] in place


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = Spec(lengths=LENGTHS, table_episodes=(2,), video_episodes=((2,), (2,)))
    return make_set(tmp_path_factory.mktemp("signals") / "clean", spec)


@pytest.fixture
def root(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "set"))


def kinds(root: Path, severity: str, **options: object) -> set[str]:
    report = check(root, horizon=4, decode=False, **options)  # pyright: ignore[reportArgumentType]
    return {problem.kind for problem in report.findings if problem.severity == severity}


def plant(root: Path, fault: Fault) -> None:
    """Rewrites state and action of the table."""

    def edit(table: pa.Table) -> pa.Table:
        columns = {k: np.array(table.column(k).to_pylist(), np.float32) for k in ("observation.state", "action")}
        fault(columns["observation.state"], columns["action"])
        for key, values in columns.items():
            at = table.column_names.index(key)
            kind = table.schema.field(key).type
            table = table.set_column(at, table.schema.field(key), pa.array(values.tolist(), kind))
        return table

    edit_table(root / TABLE, edit)


def nearly_constant(state: Numbers, action: Numbers) -> None:
    state[:, 0] = 5 + 1e-4 * np.sin(np.arange(len(state)))


def narrow(state: Numbers, action: Numbers) -> None:
    state[:, 0] = 0.0
    state[7, 0] = 1.0


def idle(state: Numbers, action: Numbers) -> None:
    state[10:80], state[100:190] = state[10], state[100]


def wrapped(state: Numbers, action: Numbers) -> None:
    state[40:60, 1] += 2 * np.pi


def copied(state: Numbers, action: Numbers) -> None:
    action[:] = state


def in_degrees(state: Numbers, action: Numbers) -> None:
    action[:] = np.degrees(state)


def opposite(state: Numbers, action: Numbers) -> None:
    action[:, 3] = -state[:, 3]


WARNINGS: dict[str, Fault] = {
    "nearly-constant": nearly_constant,
    "narrow-quantiles": narrow,
    "idle": idle,
    "angle-wrap": wrapped,
    "action-is-state": copied,
    "unit-mismatch": in_degrees,
    "opposite-sign": opposite,
}


def test_a_clean_set_is_silent(root: Path) -> None:
    assert kinds(root, "error") == set()
    assert kinds(root, "warning") == set()
    assert not {"saturated", "degrees"} & kinds(root, "note")


@pytest.mark.parametrize("kind", WARNINGS)
def test_a_fault_is_named(root: Path, kind: str) -> None:
    plant(root, WARNINGS[kind])
    assert kind in kinds(root, "warning")


def test_a_dimension_at_its_limit(root: Path) -> None:
    def clip(state: Numbers, action: Numbers) -> None:
        state[:, 0] = state[:, 0].clip(-0.5, 0.5)

    plant(root, clip)
    assert "saturated" in kinds(root, "note")


def test_encoder_ticks(root: Path) -> None:
    def ticks(state: Numbers, action: Numbers) -> None:
        state[:, :2] *= 90

    plant(root, ticks)
    assert "degrees" in kinds(root, "note")


def test_repeated_episodes(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", Spec(lengths=(60, 60), table_episodes=(2,), video_episodes=((2,), (2,))))

    def repeat(state: Numbers, action: Numbers) -> None:
        state[60:], action[60:] = state[:60], action[:60]

    assert "duplicate-episodes" not in kinds(root, "warning")
    plant(root, repeat)
    assert "duplicate-episodes" in kinds(root, "warning")


def test_deltas_of_deltas_are_an_error_for_the_recipe_that_takes_them(root: Path) -> None:
    def deltas(state: Numbers, action: Numbers) -> None:
        action[:-1] = np.diff(state, axis=0)

    plant(root, deltas)
    run = recipe("pi0_aloha_sim")
    takes = {mask: dataclasses.replace(run.data.robot, delta_mask=mask) for mask in ((), (4, -10))}
    runs = {
        mask: dataclasses.replace(run, data=dataclasses.replace(run.data, robot=robot)) for mask, robot in takes.items()
    }
    assert "double-delta" not in kinds(root, "error", run=runs[()])
    assert "double-delta" in kinds(root, "error", run=runs[4, -10])


def _reword(root: Path, words: dict[str, str]) -> None:
    table = pq.read_table(root / TASK_TABLE)
    for name in table.column_names:
        if pa.types.is_string(table.schema.field(name).type):
            texts = [words.get(text, text) for text in table.column(name).to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(texts))
    pq.write_table(table, root / TASK_TABLE)


def test_a_prompt_beyond_the_token_budget(root: Path) -> None:
    _reword(root, {TASKS[0]: "pick up the red block " * 20})
    assert "long-task" in kinds(root, "warning")


def test_two_spellings_of_one_task(root: Path) -> None:
    _reword(root, {TASKS[1]: f" {TASKS[0].upper()}."})
    assert "task-twins" in kinds(root, "warning")


@pytest.mark.parametrize("horizon", [0, -5])
def test_a_horizon_below_one(root: Path, horizon: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more action steps"):
        check(root, horizon=horizon)
