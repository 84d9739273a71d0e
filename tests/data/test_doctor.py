"""`piston data info` and `piston data check`: every finding on a set that has it, and silence on one that has not."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from make_sets import (
    CAMERAS,
    HEIGHT,
    TASKS,
    WIDTH,
    X264_B,
    Spec,
    code_frame,
    edit_episode,
    edit_json,
    edit_table,
    make_set,
    set_cell,
    write_json,
    write_lines,
    write_video,
)
from rich.console import Console

from piston.data.doctor import check, check_command, info_command, padded_share, render_report
from piston.data.info import human, info, render_info
from piston.data.problems import BadDataset, Problem

TABLE = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{CAMERAS[1]}/chunk-000/file-000.mp4"


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("doctor") / "clean", Spec())


@pytest.fixture
def root(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "set"))


def findings(root: Path, severity: str = "warning", horizon: int = 4) -> dict[str, Problem]:
    return {problem.kind: problem for problem in check(root, horizon=horizon).findings if problem.severity == severity}


def test_a_clean_set_has_neither_errors_nor_warnings(root: Path) -> None:
    report = check(root, horizon=4)
    assert report.ok
    assert {problem.kind for problem in report.findings} == {"no-quantiles", "absolute-actions", "padded-actions"}
    assert {problem.severity for problem in report.findings} == {"note"}


def test_absolute_actions_are_recognised(root: Path) -> None:
    found = findings(root, "note")["absolute-actions"]
    assert "dimensions 0, 1, 2, 3 follow the next `observation.state`" in found.value


def _with_column(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[pa.Table], pa.Table]:
    def edit(table: pa.Table) -> pa.Table:
        old = np.array(table.column(name).to_pylist(), np.float32)
        at = table.column_names.index(name)
        kind = table.schema.field(name).type
        return table.set_column(at, table.schema.field(name), pa.array(list(make(old).astype(np.float32)), kind))

    return edit


def _edit_both_tables(root: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    for path in (root / "data/chunk-000").glob("*.parquet"):
        edit_table(path, edit)


def test_delta_actions_are_recognised(root: Path) -> None:
    def to_deltas(table: pa.Table) -> pa.Table:
        state = np.array(table.column("observation.state").to_pylist(), np.float32)
        return _with_column("action", lambda action: action - state)(table)

    _edit_both_tables(root, to_deltas)
    found = findings(root)["delta-actions"]
    assert "dimensions 0, 1, 3 follow the change of `observation.state`" in found.value  # 2 moves at one speed
    assert "delta_mask" in found.fix
    assert "absolute-actions" not in findings(root, "note")


def test_constant_and_wild_dimensions(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", Spec(lengths=(150, 150), table_episodes=(2,), video_episodes=((2,),)))

    def edit(state: np.ndarray) -> np.ndarray:
        state = state.copy()
        state[:, 1] = 0.25
        return state

    _edit_both_tables(root, _with_column("observation.state", edit))
    edit_table(root / TABLE, lambda table: set_cell(table, "action", 3, [0.0, 0.0, 900.0, 0.0]))
    warnings = findings(root)
    assert "`observation.state` has constant dimensions" in warnings["constant"].what
    assert "dimensions 1 of 4" in warnings["constant"].value
    assert "`action`" in warnings["outliers"].what
    assert "dimensions 2;" in warnings["outliers"].value
    assert "900" in warnings["outliers"].value


def test_actions_wider_than_the_model(root: Path) -> None:
    def widen(table: pa.Table) -> pa.Table:
        at = table.column_names.index("action")
        rows = np.random.default_rng(0).normal(size=(table.num_rows, 40)).astype(np.float32)
        return table.set_column(at, "action", pa.array(list(rows), pa.list_(pa.float32(), 40)))

    _edit_both_tables(root, widen)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features["action"]["shape"] = [40]
    edit_json(root / "meta/info.json", features=features)
    assert findings(root)["too-wide"].value == "40"


@pytest.mark.parametrize(("lengths", "horizon"), [([3, 5, 1], 4), ([10], 3), ([2, 2], 50), ([7], 1)])
def test_padded_share_counts_repeated_steps(lengths: list[int], horizon: int) -> None:
    steps = [t + k >= n for n in lengths for t in range(n) for k in range(horizon)]
    assert padded_share(np.array(lengths), horizon) == pytest.approx(np.mean(steps))


def test_much_padding_is_a_warning(root: Path) -> None:
    assert "horizon 50" in findings(root, horizon=50)["padded-actions"].what
    assert "padded-actions" in findings(root, "note", horizon=4)


def test_frozen_and_black_cameras(root: Path) -> None:
    lengths = Spec().lengths
    still = [[code_frame(1, e, 0)] * length for e, length in enumerate(lengths)]
    write_video(root / VIDEO, still, 10)
    dark = [[np.zeros((HEIGHT, WIDTH, 3), np.uint8)] * length for length in lengths[:2]]
    write_video(root / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4", dark, 10)
    warnings = findings(root)
    assert warnings["frozen"].camera == CAMERAS[1]
    assert warnings["black"].camera == CAMERAS[0]


def test_a_picture_that_does_not_decode_is_an_error(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", Spec(images=True))
    edit_table(root / TABLE, lambda table: set_cell(table, CAMERAS[0], 4, {"bytes": b"no image", "path": None}))
    found = findings(root, "error")["undecodable"]
    assert (found.episode, found.camera) == (0, CAMERAS[0])
    assert not check(root).ok


def test_spare_frames_and_orphan_files(root: Path) -> None:
    episodes = [[code_frame(1, e, i) for i in range(length)] for e, length in enumerate(Spec().lengths)]
    write_video(root / VIDEO, [*episodes, [code_frame(1, 9, 0)] * 3], 10)
    shutil.copy(root / VIDEO, root / f"videos/{CAMERAS[1]}/chunk-000/file-007.mp4")
    (root / "images").mkdir()
    (root / "images/frame_000000.png").write_bytes(b"x")
    found = findings(root)
    assert "up to 3 frames" in found["spare-frames"].value
    assert "file-007.mp4" in found["orphan-files"].value
    assert "staging-images" in findings(root, "note")


def test_an_offset_between_keyframes(tmp_path: Path) -> None:
    """The last episode is stated one frame late where the file has frames to spare: only its keyframe gives it away."""
    root = make_set(tmp_path / "set", Spec(cameras=CAMERAS[:1], video_episodes=((5,),)))
    episodes = [[code_frame(0, e, i) for i in range(length)] for e, length in enumerate(Spec().lengths)]
    path = root / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    write_video(path, [*episodes, [code_frame(0, 9, i) for i in range(3)]], 10, options=X264_B)
    assert "off-keyframe" not in findings(root)
    edit_episode(root, 4, **{f"videos__{CAMERAS[0]}__from_timestamp": 4.7})
    found = findings(root)["off-keyframe"]
    assert (found.episode, found.value) == (4, "frame 47")


def test_metadata_that_contradicts_itself(root: Path) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[CAMERAS[0]]["info"]["video.fps"] = 25
    edit_json(root / "meta/info.json", features=features, total_frames=60, total_episodes=6)
    tasks = [{"task_index": n, "task": text} for n, text in enumerate(["", TASKS[1], "x"])]
    write_lines(root / "meta/tasks.jsonl", tasks)
    (root / "meta/tasks.parquet").unlink()
    warnings = findings(root)
    assert warnings["declared-fps"].value == "video.fps 25"
    assert {p.value for p in check(root).findings if p.kind == "totals"} == {"60", "6"}
    assert warnings["empty-task"].value == "task 0"
    assert findings(root, "note")["unused-task"].value == "2"


def test_quantiles_of_the_set_are_noticed(root: Path) -> None:
    write_json(root / "meta/stats.json", {"action": {"q01": [0], "q99": [1]}})
    assert "no-quantiles" not in findings(root, "note")


def test_slow_storage_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = make_set(tmp_path / "long", Spec("v2.1", lengths=(80,), options={"g": "250", "preset": "ultrafast"}))
    assert findings(long, "note")["long-gop"].value == "up to 80 frames"
    monkeypatch.setattr("piston.data.doctor._LARGE_GROUP", 1000)
    images = make_set(tmp_path / "images", Spec(images=True))
    assert findings(images, "note")["large-row-groups"].file == TABLE


def test_errors_come_first_and_set_the_exit_code(root: Path) -> None:
    edit_table(root / TABLE, lambda table: set_cell(table, "action", 3, [np.nan] * 4))
    output = io.StringIO()
    assert check_command(root, False, 4, Console(file=output, width=200)) == 1
    assert "not finite" in output.getvalue()
    assert "1 error, 0 warnings" in output.getvalue()
    output = io.StringIO()
    assert check_command(root, True, 4, Console(file=output)) == 1
    report = json.loads(output.getvalue())
    assert report["ok"] is False
    assert report["findings"][0]["kind"] == "not-finite"
    assert report["findings"][0]["episode"] == 0


def test_check_of_a_good_set_exits_0(root: Path) -> None:
    output = io.StringIO()
    assert check_command(root, True, 4, Console(file=output, width=40)) == 0
    assert json.loads(output.getvalue())["counts"] == {"error": 0, "warning": 0, "note": 3}


def test_commands_explain_a_directory_that_is_no_data_set(tmp_path: Path) -> None:
    for as_json in (False, True):
        for command in (
            lambda console, as_json=as_json: info_command(tmp_path, as_json, console),
            lambda console, as_json=as_json: check_command(tmp_path, as_json, 50, console),
        ):
            output = io.StringIO()
            assert command(Console(file=output, width=250)) == 1
            assert "meta/info.json" in output.getvalue()


def test_info_of_videos(root: Path) -> None:
    found = info(root)
    assert (found.version, found.robot_type, found.fps) == ("v3.0", "toy", 10)
    assert (found.episodes, found.frames, found.left_out) == (5, 57, 0)
    assert found.hours == pytest.approx(57 / 36000)
    assert found.episode_frames == (1, 12, 18)
    assert [(task.text, task.frames) for task in found.tasks] == [(TASKS[0], 24 + 9), (TASKS[1], 15 + 9)]
    camera = found.cameras[0]
    assert (camera.key, camera.stored, camera.height, camera.width) == (CAMERAS[0], "video", HEIGHT, WIDTH)
    assert (camera.codec, camera.files, camera.longest_gop) == ("h264", 2, 2)
    assert camera.size == sum(path.stat().st_size for path in (root / f"videos/{CAMERAS[0]}").rglob("*.mp4"))
    stored = {feature.key: feature.stored for feature in found.features}
    assert stored["action"] == "fixed_size_list<element: float>[4]"
    assert stored[CAMERAS[0]] == "video"
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert found.size["total"] == total


def test_info_is_printed_and_read_by_programs(root: Path, tmp_path: Path) -> None:
    output = io.StringIO()
    assert info_command(root, False, Console(file=output, width=200)) == 0
    for word in ("LeRobot v3.0", "57 at 10 fps", CAMERAS[0], "h264", TASKS[1]):
        assert word in output.getvalue()
    output = io.StringIO()
    assert info_command(root, True, Console(file=output, width=40)) == 0
    assert json.loads(output.getvalue())["frames"] == 57


def test_info_of_a_damaged_set_counts_what_is_left(tmp_path: Path) -> None:
    root = make_set(tmp_path / "set", Spec("v2.0", options=X264_B))
    (root / "data/chunk-000/episode_000001.parquet").write_bytes(b"")
    (root / f"videos/chunk-000/{CAMERAS[0]}/episode_000000.mp4").write_bytes(b"")
    found = info(root)
    assert (found.episodes, found.left_out) == (4, 1)
    assert found.cameras[0].codec == "h264"  # of the first file that can be read
    for path in root.rglob("*.parquet"):
        path.unlink()
    with pytest.raises(BadDataset, match="table file is missing"):
        info(root)


def test_info_of_images(tmp_path: Path) -> None:
    found = info(make_set(tmp_path / "set", Spec(images=True)))
    camera = found.cameras[1]
    assert (camera.stored, camera.height, camera.width, camera.codec, camera.files) == ("image", HEIGHT, WIDTH, None, 0)
    console = Console(file=io.StringIO(), width=200)
    console.print(render_info(found))
    console.print(render_report(check(Path(found.root))))


def test_human_sizes() -> None:
    assert [human(n) for n in (5, 1500, 2_000_000, 3_210_000_000)] == ["5 B", "1.5 kB", "2 MB", "3.21 GB"]
