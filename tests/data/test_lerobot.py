"""Every LeRobot version through one API; what is tolerated, what is refused, and what each refusal says."""

import json
import multiprocessing
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_sets import (
    CAMERAS,
    HEIGHT,
    TASKS,
    WIDTH,
    X264_B,
    X264_LONG,
    Spec,
    action_of,
    code_frame,
    code_of,
    edit_episode,
    edit_json,
    edit_table,
    make_set,
    set_cell,
    state_of,
    task_of,
    write_lines,
    write_video,
)
from test_video import sequential

from piston.data import handles
from piston.data.dataset import Dataset
from piston.data.doctor import check
from piston.data.layout import image_size
from piston.data.lerobot import open_dataset
from piston.data.problems import BadDataset, Problem

AV1 = {"g": "2", "crf": "30", "preset": "10"}
SPECS = {
    "v2.0": Spec("v2.0"),
    "v2.0 images": Spec("v2.0", images=True),
    "v2.1 B-frames": Spec("v2.1", options=X264_B),
    "v2.1 late start": Spec("v2.1", options=X264_B, start_pts=5),
    "v2.1 float fps": Spec("v2.1", fps=29.97, video_rate=Fraction(30000, 1001)),
    "v3.0": Spec(),
    "v3.0 B-frames": Spec(options=X264_B, task_column="task"),
    "v3.0 one row group": Spec(options=X264_LONG, row_groups=False, table_episodes=(5,), task_column="anything"),
    "v3.0 late start": Spec(start_pts=3),
    "v3.0 av1": Spec(codec="libsvtav1", options=AV1),
    "v3.0 vp9": Spec(codec="libvpx-vp9", options={"g": "15"}),
    "v3.0 images": Spec(images=True),
    "v3.0 float fps": Spec(fps=14.985, video_rate=Fraction(15000, 1001)),
    "v3.0 one camera": Spec(cameras=CAMERAS[:1], video_episodes=((1, 1, 1, 1, 1),)),
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a set by name, written once. Not to be changed."""
    folder = tmp_path_factory.mktemp("sets")

    def get(name: str) -> Path:
        root = folder / name.replace(" ", "_")
        return root if root.exists() else make_set(root, SPECS[name])

    return get


@pytest.fixture
def copied(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a set, to be broken."""
    return lambda name: Path(shutil.copytree(made(name), tmp_path / "set"))


def check_frames(ds: Dataset, spec: Spec = Spec()) -> None:  # noqa: B008
    """Every frame of every camera is the one that its row says."""
    for key in ds.image_keys:
        images = ds.images(key, range(ds.num_frames))
        assert images.shape == (ds.num_frames, HEIGHT, WIDTH, 3)
        positions = ds.episode_of(np.arange(ds.num_frames))
        frames = np.arange(ds.num_frames) - ds.episode_starts[positions]
        camera = spec.cameras.index(key)
        expected = [(camera, int(ds.episode_index[p]), int(f)) for p, f in zip(positions, frames, strict=True)]
        assert [code_of(image) for image in images] == expected


def check_rows(ds: Dataset) -> None:
    """Columns and tasks are those of the row's episode and frame."""
    row = 0
    for position, episode in enumerate(ds.episode_index):
        for frame in range(len(ds.rows_of(position))):
            np.testing.assert_array_equal(ds.column("observation.state")[row], state_of(int(episode), frame))
            np.testing.assert_array_equal(ds.column("action")[row], action_of(int(episode), frame))
            assert ds.task(row) == TASKS[task_of(int(episode), frame)]
            row += 1
    assert row == ds.num_frames


def kinds(ds: Dataset) -> list[str]:
    return [problem.kind for problem in ds.problems]


# ── every version through one API ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SPECS)
def test_every_version_gives_the_same_rows_and_frames(name: str, made: Callable[[str], Path]) -> None:
    spec = SPECS[name]
    ds = open_dataset(made(name))
    assert ds.version == spec.version
    assert ds.fps == pytest.approx(spec.fps)
    assert ds.robot_type == "toy"
    assert ds.image_keys == spec.cameras
    assert (ds.num_episodes, ds.num_frames) == (5, 57)
    assert ds.episode_index.tolist() == [0, 1, 2, 3, 4]
    assert ds.episode_starts.tolist() == [0, 12, 27, 28, 46, 57]
    assert ds.tasks == dict(enumerate(TASKS))
    assert ds.problems == ()
    check_rows(ds)
    check_frames(ds, spec)
    order = np.random.default_rng(0).permutation(ds.num_frames)
    for key in ds.image_keys:
        shuffled = ds.images(key, order)
        np.testing.assert_array_equal(shuffled[np.argsort(order)], ds.images(key, range(ds.num_frames)))
        np.testing.assert_array_equal(ds.image(key, 30), ds.images(key, [30])[0])


@pytest.mark.parametrize("name", [name for name in SPECS if "images" not in name])
def test_frames_equal_a_second_decoding(name: str, made: Callable[[str], Path]) -> None:
    ds = open_dataset(made(name))
    for key in ds.image_keys:
        files, file, frame = ds.video_frames(key, np.arange(ds.num_frames))
        truth = {n: sequential(path) for n, path in enumerate(files)}
        expected = np.stack([truth[int(n)][int(k)] for n, k in zip(file, frame, strict=True)])
        np.testing.assert_array_equal(ds.images(key, range(ds.num_frames)), expected)


def test_stored_images_are_exact(made: Callable[[str], Path]) -> None:
    ds = open_dataset(made("v3.0 images"))
    np.testing.assert_array_equal(ds.image(CAMERAS[1], 27 + 1 + 4), code_frame(1, 3, 4))


def test_columns_keep_dtype_and_declared_shape(made: Callable[[str], Path]) -> None:
    ds = open_dataset(made("v3.0"))
    expected = {
        "action": (np.float32, (57, 4)),
        "gripper": (np.float32, (57, 1)),
        "next.done": (np.bool_, (57, 1)),
        "timestamp": (np.float32, (57,)),
        "frame_index": (np.int64, (57,)),
        "episode_index": (np.int64, (57,)),
        "task_index": (np.int64, (57,)),
    }
    for key, (dtype, shape) in expected.items():
        assert (ds.column(key).dtype, ds.column(key).shape) == (dtype, shape)
    assert ds.column("index").tolist() == list(range(57))


def test_only_the_named_columns_and_cameras_are_checked(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    edit_table(root / "data/chunk-000/file-000.parquet", lambda t: set_cell(t, "observation.state", 3, [np.nan] * 4))
    shutil.rmtree(root / f"videos/{CAMERAS[1]}")
    ds = open_dataset(root, columns=["action"], cameras=[CAMERAS[0]])
    assert ds.image_keys == CAMERAS[:1]
    assert np.isnan(ds.column("observation.state")[3]).all()  # readable all the same
    with pytest.raises(BadDataset) as error:
        open_dataset(root, columns=["observation.state"], cameras=[])
    assert [(p.kind, p.episode) for p in error.value.problems] == [("not-finite", 0)]


# ── the index: episodes, chunks, views ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def whole(made: Callable[[str], Path]) -> Dataset:
    return open_dataset(made("v3.0"))


@given(row=st.integers(0, 56), horizon=st.integers(1, 60))
def test_chunk_rows_stay_in_the_episode_and_repeat_its_last_row(whole: Dataset, row: int, horizon: int) -> None:
    rows = whole.chunk_rows(row, horizon)
    position = int(whole.episode_of(row))
    last = int(whole.episode_starts[position + 1]) - 1
    assert rows.tolist() == [min(row + n, last) for n in range(horizon)]
    assert (whole.episode_of(rows) == position).all()


@given(row=st.integers(0, 56))
def test_episode_of_inverts_rows_of(whole: Dataset, row: int) -> None:
    assert row in whole.rows_of(int(whole.episode_of(row)))
    assert int(whole.column("episode_index")[row]) == int(whole.episode_index[whole.episode_of(row)])


@given(positions=st.lists(st.integers(0, 4), unique=True), data=st.data())
@settings(max_examples=40)
def test_select_is_the_same_rows_in_the_order_asked(whole: Dataset, positions: list[int], data: st.DataObject) -> None:
    view = whole.select(positions)
    assert view.episode_index.tolist() == positions
    assert view.num_frames == sum(SPECS["v3.0"].lengths[p] for p in positions)
    original = np.concatenate([np.empty(0, np.int64), *(whole.rows_of(p) for p in positions)])
    np.testing.assert_array_equal(view.column("index"), whole.column("index")[original])
    np.testing.assert_array_equal(view.column("action"), whole.column("action")[original])
    if positions:
        row = data.draw(st.integers(0, view.num_frames - 1))
        assert view.task(row) == whole.task(int(original[row]))
        np.testing.assert_array_equal(view.image(CAMERAS[0], row), whole.image(CAMERAS[0], int(original[row])))
        again = data.draw(st.lists(st.integers(0, len(positions) - 1), unique=True))
        assert view.select(again).episode_index.tolist() == [positions[p] for p in again]


def test_select_and_rows_outside_the_index(whole: Dataset) -> None:
    with pytest.raises(ValueError, match="repeat"):
        whole.select([1, 1])
    for call in (
        lambda: whole.select([5]),
        lambda: whole.rows_of(-1),
        lambda: whole.episode_of(57),
        lambda: whole.chunk_rows(-1, 3),
        lambda: whole.image(CAMERAS[0], 57),
    ):
        with pytest.raises(IndexError):
            call()


def test_unknown_column_and_camera_are_named(whole: Dataset) -> None:
    with pytest.raises(ValueError, match="no column: `actions`"):
        whole.column("actions")
    with pytest.raises(ValueError, match=r"no camera `top`.*observation\.images\.top"):
        whole.image("top", 0)


def _child(ds: Dataset, results: Any) -> None:
    results.put(([code_of(ds.image(CAMERAS[0], row)) for row in (50, 3)], ds.column("action")[7].tolist()))


@pytest.mark.parametrize(("method", "name"), [("fork", "v3.0"), ("fork", "v3.0 images"), ("spawn", "v3.0")])
def test_another_process_reads_the_same(made: Callable[[str], Path], method: str, name: str) -> None:
    whole = open_dataset(made(name))
    whole.image(CAMERAS[0], 20)
    context: Any = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in threaded processes
        process = context.Process(target=_child, args=(whole, results))
        process.start()
    frames, action = results.get()
    process.join()
    assert frames == [(0, 4, 4), (0, 0, 3)]
    assert action == action_of(0, 7).tolist()


def test_a_pickled_view_holds_no_file_and_no_second_copy(whole: Dataset) -> None:
    view = whole.select([3, 1])
    view.column("action")
    view.image(CAMERAS[0], 0)
    copy = pickle.loads(pickle.dumps(view))
    assert copy._columns == {}
    np.testing.assert_array_equal(copy.column("action"), view.column("action"))
    assert code_of(copy.image(CAMERAS[1], 20)) == (1, 1, 2)


# ── oddities that are tolerated ──────────────────────────────────────────────────────────────────────────────────────


def _point_elsewhere(root: Path) -> None:
    for episode in range(5):
        edit_episode(root, episode, data__file_index=(0 if episode >= 3 else 7))


def _add_orphans(root: Path) -> None:
    table = pq.read_table(root / "data/chunk-000/file-000.parquet").slice(0, 6)
    at = table.column_names.index("episode_index")
    pq.write_table(
        table.set_column(at, "episode_index", pa.array([77] * 6, pa.int64())), root / "data/chunk-000/file-002.parquet"
    )


def _store_twice(root: Path) -> None:
    shutil.copy(root / "data/chunk-000/file-000.parquet", root / "data/chunk-000/file-009.parquet")


def _wrap_index_columns(root: Path) -> None:
    """Some converters store even scalars as lists of one."""

    def edit(table: pa.Table) -> pa.Table:
        for name in ("timestamp", "frame_index", "episode_index", "task_index", "gripper"):
            at, old = table.column_names.index(name), table.column(name)
            kind = pa.list_(table.schema.field(name).type)
            table = table.set_column(at, name, pa.array([[value] for value in old.to_pylist()], kind))
        return table

    edit_table(root / "data/chunk-000/file-001.parquet", edit)


def _split_an_episode(root: Path) -> None:
    """The last five rows of episode 1 and the whole of episode 2 go to a file of their own, in other row groups."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(22, 6), root / "data/chunk-000/file-005.parquet", row_group_size=4)
    pq.write_table(table.slice(0, 22), path, row_group_size=5)


def _shuffle_rows(root: Path) -> None:
    order = np.random.default_rng(0).permutation(28)
    edit_table(root / "data/chunk-000/file-000.parquet", lambda table: table.take(pa.array(order)))


def _list_twice(root: Path) -> None:
    shard = root / "meta/episodes/chunk-000"
    shutil.copy(shard / "file-001.parquet", shard / "file-002.parquet")


def _extra_columns(root: Path) -> None:
    def add(table: pa.Table) -> pa.Table:
        events = [[{"text": "go", "frame": n}] for n in range(table.num_rows)]
        return table.append_column("language_events", pa.array(events)).append_column(
            "note", pa.array(["x"] * table.num_rows)
        )

    edit_table(root / "data/chunk-000/file-000.parquet", add)


def _declare_absent(root: Path) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features["language_instruction"] = {"dtype": "string", "shape": [1], "names": None}
    edit_json(root / "meta/info.json", features=features)


def _declare_depth(root: Path) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features["observation.images.depth"] = {**features[CAMERAS[0]], "info": {"video.is_depth_map": True}}
    edit_json(root / "meta/info.json", features=features)


def _declare_ghost_camera(root: Path) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features["observation.images.ghost"] = dict(features[CAMERAS[0]])
    edit_json(root / "meta/info.json", features=features)


def _wrong_declared_size(root: Path) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[CAMERAS[0]]["shape"] = [64, 96, 3]
    edit_json(root / "meta/info.json", features=features)


def _drop(*names: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        for path in (root / "data").glob("*/*.parquet"):
            edit_table(path, lambda table: table.drop_columns(list(names)))

    return edit


def _one_task(root: Path) -> None:
    _drop("task_index")(root)
    for episode in range(5):
        edit_episode(root, episode, tasks=[TASKS[task_of(episode, 0)]])


TOLERATED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "metadata points at other files": (_point_elsewhere, ["wrong-file"]),
    "orphan rows": (_add_orphans, ["orphan-rows"]),
    "rows stored twice": (_store_twice, ["repeated-rows"] * 3),
    "rows out of order": (_shuffle_rows, []),
    "scalars stored as lists": (_wrap_index_columns, []),
    "an episode in two files": (_split_an_episode, ["wrong-file"]),
    "episodes listed twice": (_list_twice, ["repeated-episodes"]),
    "columns nobody declared": (_extra_columns, []),
    "a declared column that is not stored": (_declare_absent, ["absent-column"]),
    "a depth camera": (_declare_depth, ["depth"]),
    "a camera without videos": (_declare_ghost_camera, ["no-video-columns"]),
    "a wrong declared frame size": (_wrong_declared_size, ["declared-size"]),
    "no frame_index": (_drop("frame_index"), ["absent-column"]),
    "no timestamp": (_drop("timestamp"), ["absent-column"]),
    "no index": (_drop("index"), ["absent-column"]),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_oddities_that_change_nothing(name: str, copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    edit, expected = TOLERATED[name]
    edit(root)
    ds = open_dataset(root)
    assert kinds(ds) == expected
    assert all(problem.severity == "warning" for problem in ds.problems)
    assert (ds.num_episodes, ds.num_frames, ds.image_keys) == (5, 57, CAMERAS)
    check_rows(ds)
    check_frames(ds)


def test_extra_columns_can_be_read_if_they_are_arrays(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    _extra_columns(root)
    ds = open_dataset(root)
    assert ds.column("note").tolist() == ["x"] * 28 + [""] * 29
    with pytest.raises(ValueError, match="no array of numbers or texts: `language_events`"):
        ds.column("language_events")


def test_tasks_of_episodes_where_rows_have_none(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    _one_task(root)
    ds = open_dataset(root)
    assert [ds.task(int(start)) for start in ds.episode_starts[:-1]] == [TASKS[n % 2] for n in range(5)]
    edit_episode(root, 1, tasks=list(TASKS))
    with pytest.raises(ValueError, match=r"episode 1 of .* has 2 task texts"):
        open_dataset(root).task(13)


@pytest.mark.parametrize("form", ["named index", "jsonl", "index is the number"])
def test_forms_of_the_task_table(form: str, copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    path = root / "meta/tasks.parquet"
    path.unlink()
    if form == "named index":  # as pandas writes a frame whose index is called `task`
        table = pa.table({"task_index": [1, 0], "task": [TASKS[1], TASKS[0]]})
        pandas = {"index_columns": ["task"], "columns": [], "pandas_version": "2"}
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)
    elif form == "jsonl":
        write_lines(root / "meta/tasks.jsonl", [{"task_index": n, "task": task} for n, task in enumerate(TASKS)])
    else:
        pq.write_table(pa.table({"task": list(TASKS)}), path)
    check_rows(open_dataset(root))


def test_task_texts_of_any_script(copied: Callable[[str], Path]) -> None:
    """Written without escapes, as LeRobot does; a line separator inside a text ends no line of JSON."""
    root = copied("v2.0")
    texts = ["pick\u2028up the 红色 cube", "décale-le"]
    lines = (json.dumps({"task_index": n, "task": text}, ensure_ascii=False) for n, text in enumerate(texts))
    (root / "meta/tasks.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert open_dataset(root).tasks == dict(enumerate(texts))


def test_episode_numbers_may_have_gaps(copied: Callable[[str], Path]) -> None:
    for version in ("v3.0", "v2.0"):
        root = copied(version)
        if version == "v2.0":
            lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
            write_lines(root / "meta/episodes.jsonl", [lines[4], lines[1]])
        else:
            for path in (root / "meta/episodes").glob("*/*.parquet"):
                edit_table(path, lambda t: t.filter(pa.array([n in (1, 4) for n in t["episode_index"].to_pylist()])))
        ds = open_dataset(root)
        assert ds.episode_index.tolist() == [1, 4]
        check_rows(ds)
        check_frames(ds)
        shutil.rmtree(root)


def test_offsets_may_count_from_the_containers_zero(copied: Callable[[str], Path]) -> None:
    """Videos that start at 0.3 s: offsets of the first kind say 0, those of the second 0.3."""
    root = copied("v3.0 late start")
    for episode in range(5):
        for path in (root / "meta/episodes").glob("*/*.parquet"):
            for row in pq.read_table(path).to_pylist():
                if row["episode_index"] == episode:
                    shifted = {
                        name.replace("/", "__"): value + 0.3
                        for name, value in row.items()
                        if name.endswith("timestamp")
                    }
                    edit_episode(root, episode, **shifted)
    check_frames(open_dataset(root))


def test_drifted_offsets_are_put_right_where_lengths_fill_the_file(copied: Callable[[str], Path]) -> None:
    """Episode 4 of the wrist camera is stated half a frame late, as sums of rounded durations are."""
    root = copied("v3.0")
    key = f"videos__{CAMERAS[1]}__from_timestamp"
    edit_episode(root, 4, **{key: 4.6 + 0.06})
    ds = open_dataset(root)
    assert kinds(ds) == ["offset-drift"]
    check_frames(ds)


def test_gaps_in_the_video_that_the_offsets_know(copied: Callable[[str], Path]) -> None:
    """Files joined by their container durations: a pause after each episode, counted in from_timestamp too."""
    root, lengths = copied("v3.0"), SPECS["v3.0"].lengths
    episodes = [[code_frame(1, e, i) for i in range(length)] for e, length in enumerate(lengths)]
    starts, times, now = [], [], 0
    for length in lengths:
        starts.append(now / 100)
        times += [now + 10 * i for i in range(length)]
        now += 10 * length + 7
    path = root / f"videos/{CAMERAS[1]}/chunk-000/file-000.mp4"
    write_video(path, episodes, 10, options=X264_B, times=times, ticks=100)
    for e, start in enumerate(starts):
        edit_episode(root, e, **{f"videos__{CAMERAS[1]}__from_timestamp": start})
    ds = open_dataset(root)
    assert ds.problems == ()
    check_frames(ds)


def test_unchecked_videos_are_indexed_when_read(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    ds = open_dataset(root, check_videos=False)
    check_frames(ds)
    shutil.rmtree(root / f"videos/{CAMERAS[0]}")
    handles.close_all()
    ds = open_dataset(root, check_videos=False)
    with pytest.raises(ValueError, match="video file is missing"):
        ds.image(CAMERAS[0], 0)


@pytest.mark.parametrize(
    ("shape", "names", "size"),
    [
        ([480, 640, 3], ["height", "width", "channels"], (480, 640)),
        ([480, 640, 3], ["height", "width", "channel"], (480, 640)),
        ([3, 480, 640], ["channels", "height", "width"], (480, 640)),
        ([3, 480, 640], None, (480, 640)),
        ([480, 640, 3], None, (480, 640)),
        ([3, 4, 3], ["channels", "height", "width"], (4, 3)),
        ([14], None, None),
    ],
)
def test_image_size_goes_by_the_names_of_axes(
    shape: list[int], names: list[str] | None, size: tuple[int, int] | None
) -> None:
    assert image_size({"shape": shape, "names": names}) == size


# ── faults: each one a problem with its place, and the other episodes untouched ──────────────────────────────────────


def _v2(kind: str, episode: int, camera: int = 0) -> str:
    if kind == "data":
        return f"data/chunk-{episode // 3:03d}/episode_{episode:06d}.parquet"
    return f"videos/chunk-{episode // 3:03d}/{CAMERAS[camera]}/episode_{episode:06d}.mp4"


def _cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daa\nsize 1\n"
)


def _reencode(root: Path, frames: int, rate: int, size: int = 1) -> None:
    episode = [np.kron(code_frame(0, 1, i), np.ones((size, size, 1), np.uint8)) for i in range(frames)]
    write_video(root / _v2("video", 1), [episode], rate)


def _cells(column: str, row: int, value: object) -> Callable[[Path], None]:
    return lambda root: edit_table(root / _v2("data", 1), lambda table: set_cell(table, column, row, value))


def _length_in_lines(root: Path, length: int) -> None:
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    lines[1]["length"] = length
    write_lines(root / "meta/episodes.jsonl", lines)


def _widen_action(root: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        at = table.column_names.index("action")
        return table.set_column(at, "action", pa.array([[0.0] * 5] * table.num_rows, pa.list_(pa.float32(), 5)))

    edit_table(root / _v2("data", 1), edit)


def _null_action(root: Path) -> None:
    edit_table(root / _v2("data", 1), lambda table: set_cell(table, "action", 2, None))


FAULTS_V2: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "missing video": (lambda r: (r / _v2("video", 1)).unlink(), "missing-video", ("no such file", CAMERAS[0])),
    "empty video": (lambda r: (r / _v2("video", 1)).write_bytes(b""), "empty-video", ("0 bytes",)),
    "LFS pointer": (lambda r: (r / _v2("video", 1)).write_bytes(LFS), "lfs-pointer", ("git lfs pull",)),
    "truncated video": (lambda r: _cut(r / _v2("video", 1), 0.3), "unreadable-video", ("cut short", CAMERAS[0])),
    "video with too few frames": (lambda r: _reencode(r, 11, 10), "short-video", ("11 frames", "15 frames")),
    "video of another rate": (lambda r: _reencode(r, 15, 12), "video-fps", ("12 fps", "10 fps")),
    "video of another rate and length": (lambda r: _reencode(r, 8, 5), "video-fps", ("5 fps", "10 fps")),
    "video of another size": (lambda r: _reencode(r, 15, 10, 2), "frame-size", ("64×96", "32×48")),
    "missing table": (lambda r: (r / _v2("data", 1)).unlink(), "missing-table", ("no such file",)),
    "empty table": (lambda r: (r / _v2("data", 1)).write_bytes(b""), "empty-table", ("0 bytes",)),
    "table without footer": (lambda r: _cut(r / _v2("data", 1), 0.8), "unreadable-table", ("footer",)),
    "table as LFS pointer": (lambda r: (r / _v2("data", 1)).write_bytes(LFS), "lfs-pointer", ("git lfs pull",)),
    "NaN in actions": (
        _cells("action", 4, [0.0, np.nan, 0.0, np.nan]), "not-finite", ("`action`", "nan in dimension 1, 3 of frame 4")
    ),
    "infinite state": (
        _cells("observation.state", 0, [np.inf, 0.0, 0.0, 0.0]), "not-finite", ("`observation.state`", "inf", "frame 0")
    ),
    "null action": (_null_action, "not-finite", ("`action`", "frame 2")),
    "another action dimension": (_widen_action, "wrong-shape", ("`action`", "(4,)")),
    "a column missing in one file": (
        lambda r: edit_table(r / _v2("data", 1), lambda t: t.drop_columns(["action"])), "missing-column", ("`action`",)
    ),
    "empty episode": (
        lambda r: edit_table(r / _v2("data", 1), lambda table: table.slice(0, 0)), "empty-episode", ("no rows", "15")
    ),
    "fewer rows than stated": (
        lambda r: edit_table(r / _v2("data", 1), lambda table: table.slice(0, 13)), "episode-length", ("13 rows", "15")
    ),
    "another length stated": (lambda r: _length_in_lines(r, 14), "episode-length", ("15 rows", "14")),
    "a gap in frame_index": (_cells("frame_index", 6, 99), "frame-index", ("7 in the episode's row 6",)),
    "timestamp off the grid": (_cells("timestamp", 5, 0.53), "timestamp", ("0.53 s in frame 5", "0.5 s")),
    "timestamp not a number": (_cells("timestamp", 5, np.nan), "timestamp", ("nan s in frame 5",)),
    "unknown task": (_cells("task_index", 3, 9), "unknown-task", ("9", "0, 1")),
    "rows of another episode": (
        lambda r: shutil.copy(r / _v2("data", 0), r / _v2("data", 1)), "wrong-episode-index", ("0", "1")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS_V2)
def test_a_fault_is_reported_with_its_place_or_its_episode_left_out(
    name: str, copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    root = copied("v2.1 B-frames")
    edit, kind, words = FAULTS_V2[name]
    edit(root)
    with pytest.raises(BadDataset) as error:
        open_dataset(root)
    found = error.value.problems
    assert kind in [problem.kind for problem in found]
    assert {problem.episode for problem in found} == {1}
    for word in (*words, "episode 1", "expected", "bad_episodes=skip"):
        assert word in str(error.value)
    assert all(problem.fix and problem.value and problem.file for problem in found)
    ds = open_dataset(root, bad_episodes="skip")
    assert ds.episode_index.tolist() == [0, 2, 3, 4]
    assert [problem for problem in ds.problems if problem.severity == "error"] == list(found)
    assert "left out 1 of 5 episodes: [1]" in caplog.text
    check_rows(ds)
    check_frames(ds)


def _shift(root: Path, episode: int, seconds: float | None, camera: int = 1) -> None:
    edit_episode(root, episode, **{f"videos__{CAMERAS[camera]}__from_timestamp": seconds})


def _shift_two(root: Path) -> None:
    """Without episode 4 the lengths do not fill the file: nothing says what episode 1's odd offset means."""
    _shift(root, 1, 1.25)
    _shift(root, 4, None)


def _cut_shard(root: Path) -> None:
    _cut(root / "meta/episodes/chunk-000/file-001.parquet", 0.6)


FAULTS_V3: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...], set[int]]] = {
    "offset past the end": (lambda r: _shift(r, 4, 460.0), "offset-past-end", ("460", "57 frames"), {4}),
    "offset of no sense": (lambda r: _shift(r, 4, 1e30), "offset-past-end", ("57 frames",), {4}),
    "offset before the start": (lambda r: _shift(r, 1, -1.0), "offset-past-end", ("-1",), {1}),
    "offset a whole frame late": (lambda r: _shift(r, 1, 1.3), "overlap", ("frames 27",), {1, 2}),
    "offset off the grid": (lambda r: _shift_two(r), "video-timestamp", ("ms", "tolerance"), {1, 4}),
    "no offset": (lambda r: _shift(r, 3, None), "no-video-offset", ("none",), {3}),
    "a file that is not there": (
        lambda r: edit_episode(r, 4, **{f"videos__{CAMERAS[1]}__file_index": 8}), "missing-video", ("file-008",), {4}
    ),
    "a video missing that holds several episodes": (
        lambda r: (r / f"videos/{CAMERAS[0]}/chunk-000/file-001.mp4").unlink(),
        "missing-video", (CAMERAS[0],), {2, 3, 4},
    ),
    "an episode of no frames": (lambda r: _empty_episode(r), "empty-episode", ("no rows",), {2}),
    "a longer episode stated": (lambda r: edit_episode(r, 0, length=14), "episode-length", ("12 rows", "14"), {0}),
    "a table without footer": (
        lambda r: _cut(r / "data/chunk-000/file-001.parquet", 0.8), "unreadable-table", ("footer",), {3, 4}
    ),
    "a shard of the episode table without footer": (_cut_shard, "unreadable-table", ("meta/episodes",), {2, 3, 4}),
}  # fmt: skip


def _empty_episode(root: Path) -> None:
    edit_table(root / "data/chunk-000/file-000.parquet", lambda table: table.slice(0, 27))
    edit_episode(root, 2, length=0)


@pytest.mark.parametrize("name", FAULTS_V3)
def test_faults_of_shared_files(name: str, copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    edit, kind, words, lost = FAULTS_V3[name]
    edit(root)
    with pytest.raises(BadDataset) as error:
        open_dataset(root)
    assert kind in [problem.kind for problem in error.value.problems]
    for word in words:
        assert word in str(error.value)
    ds = open_dataset(root, bad_episodes="skip")
    assert set(range(5)) - set(ds.episode_index.tolist()) == lost
    check_rows(ds)
    check_frames(ds)


def test_an_episode_table_that_numbers_none_is_an_error_of_open_and_check(copied: Callable[[str], Path]) -> None:
    def without_numbers(table: pa.Table) -> pa.Table:
        return table.drop_columns(["episode_index"])

    root = copied("v3.0")
    for edit, kind, word in ((without_numbers, "missing-column", "`episode_index`"), (_no_rows, "no-episodes", "0")):
        for shard in (root / "meta/episodes").glob("**/*.parquet"):
            edit_table(shard, edit)
            if edit is _no_rows:
                edit_table(shard, lambda table: table.append_column("episode_index", pa.array([], pa.int64())))
        with pytest.raises(BadDataset, match=word) as error:
            open_dataset(root)
        assert kind in [problem.kind for problem in error.value.problems]
        report = check(root, decode=False)
        assert not report.ok
        assert report.findings[0].kind == kind


def _no_rows(table: pa.Table) -> pa.Table:
    return table.slice(0, 0)


def test_a_wrong_fps_in_the_metadata_names_both_rates(copied: Callable[[str], Path]) -> None:
    for version in ("v2.0", "v3.0"):
        root = copied(version)
        edit_json(root / "meta/info.json", fps=12)
        with pytest.raises(BadDataset) as error:
            open_dataset(root)
        assert {problem.kind for problem in error.value.problems} >= {"timestamp", "video-fps"}
        assert "10 per second" in str(error.value)
        assert "10 fps, expected 12 fps" in str(error.value)
        shutil.rmtree(root)


def test_the_tolerance_decides_about_jitter(copied: Callable[[str], Path]) -> None:
    root = copied("v2.1 B-frames")
    _cells("timestamp", 5, 0.503)(root)
    times = [int(1000 * i / 10 + (i % 3)) for i in range(15)]
    write_video(root / _v2("video", 1), [[code_frame(0, 1, i) for i in range(15)]], 10, times=times, ticks=1000)
    with pytest.raises(BadDataset) as error:
        open_dataset(root)
    assert {problem.kind for problem in error.value.problems} == {"timestamp", "video-timestamp"}
    ds = open_dataset(root, tolerance_s=5e-3)
    assert ds.problems == ()
    check_frames(ds)


def test_long_episodes_round_their_float32_timestamps(copied: Callable[[str], Path]) -> None:
    """At 4 000 s a float32 timestamp is up to 1.2e-4 s off: that is no fault of the data."""
    root = copied("v2.0")
    frames = 40_001
    columns = {
        "action": pa.array(np.zeros((frames, 4), np.float32).tolist(), pa.list_(pa.float32(), 4)),
        "timestamp": pa.array((np.arange(frames) / 10 + 1e-5).astype(np.float32)),
        "frame_index": pa.array(np.arange(frames)),
        "episode_index": pa.array(np.ones(frames, np.int64)),
        "task_index": pa.array(np.zeros(frames, np.int64)),
    }
    pq.write_table(pa.table(columns), root / _v2("data", 1))
    _length_in_lines(root, frames)
    ds = open_dataset(root, check_videos=False, columns=["action"])
    assert ds.num_frames == 57 - 15 + frames


def test_many_problems_are_listed_together(copied: Callable[[str], Path]) -> None:
    root = copied("v2.0")
    (root / _v2("video", 0)).unlink()
    _cells("action", 4, [np.nan] * 4)(root)
    (root / _v2("data", 3)).write_bytes(b"")
    with pytest.raises(BadDataset, match=r"3 problem\(s\)") as error:
        open_dataset(root)
    assert sorted((p.episode, p.kind) for p in error.value.problems) == [
        (0, "missing-video"),
        (1, "not-finite"),
        (3, "empty-table"),
    ]
    assert "--data.bad-episodes skip" in str(error.value)
    ds = open_dataset(root, bad_episodes="skip")
    assert ds.episode_index.tolist() == [2, 4]
    check_rows(ds)
    check_frames(ds)


def test_a_damaged_line_loses_its_episode_only(copied: Callable[[str], Path]) -> None:
    root = copied("v2.0")
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(BadDataset, match="line 5"):
        open_dataset(root)
    assert open_dataset(root, bad_episodes="skip").episode_index.tolist() == [0, 1, 2, 3]


def test_bytes_that_are_no_text_lose_their_line_only(copied: Callable[[str], Path]) -> None:
    root = copied("v2.0")
    path = root / "meta/episodes.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"episode_index": 2', b'"episode_index\xe5: 2'))
    with pytest.raises(BadDataset, match="line 3"):
        open_dataset(root)
    assert open_dataset(root, bad_episodes="skip").episode_index.tolist() == [0, 1, 3, 4]


def test_no_table_that_can_be_read(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    for path in root.glob("data/*/*.parquet"):
        _cut(path, 0.5)
    with pytest.raises(BadDataset, match=r"7 problem\(s\)"):  # two files, five episodes without rows
        open_dataset(root, bad_episodes="skip")


def test_without_task_texts_only_prompts_are_lost(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    (root / "meta/tasks.parquet").unlink()
    with pytest.raises(BadDataset, match="table of tasks is missing"):
        open_dataset(root)
    ds = open_dataset(root, bad_episodes="skip")
    assert ds.num_episodes == 5
    with pytest.raises(ValueError, match="row 0 has task_index 0"):
        ds.task(0)


def test_undecodable_stored_images_are_named(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0 images")
    path = root / "data/chunk-000/file-000.parquet"
    edit_table(path, lambda table: set_cell(table, CAMERAS[0], 4, {"bytes": b"no image", "path": None}))
    edit_table(path, lambda table: set_cell(table, CAMERAS[0], 5, {"bytes": None, "path": None}))
    ds = open_dataset(root)
    for row, words in ((4, "cannot be decoded"), (5, "no image")):
        with pytest.raises(ValueError, match=rf"{words}.*{CAMERAS[0]}.*row {row} of .*file-000\.parquet"):
            ds.image(CAMERAS[0], row)
    assert code_of(ds.image(CAMERAS[0], 6)) == (0, 0, 6)


# ── refused as a whole ───────────────────────────────────────────────────────────────────────────────────────────────


def _no_info(root: Path) -> None:
    (root / "meta/info.json").unlink()


def _no_chunks(root: Path) -> None:
    edit_json(root / "meta/info.json", codebase_version="v2.0", chunks_size=0)
    write_lines(root / "meta/episodes.jsonl", [])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "version 1.6": (lambda r: edit_json(r / "meta/info.json", codebase_version="v1.6"), "'v1.6'.*converters"),
    "a later version": (lambda r: edit_json(r / "meta/info.json", codebase_version="v4.0"), "'v4.0'.*newer"),
    "no version": (lambda r: edit_json(r / "meta/info.json", codebase_version=None), "None, expected v2.0, v2.1, v3.0"),
    "lance": (lambda r: edit_json(r / "meta/info.json", storage_format="lance"), "'lance', expected parquet"),
    "no info.json": (_no_info, "give the directory that holds meta/"),
    "info.json that is no JSON": (lambda r: (r / "meta/info.json").write_text("{"), "not JSON"),
    "fps 0": (lambda r: edit_json(r / "meta/info.json", fps=0), "frame rate is not a number: 0"),
    "fps as text": (lambda r: edit_json(r / "meta/info.json", fps="30"), "frame rate is not a number: '30'"),
    "chunks that are no number": (
        _no_chunks,
        "`chunks_size`"
    ),
    "no features": (lambda r: edit_json(r / "meta/info.json", features={}), "describes no features"),
    "an unknown placeholder": (
        lambda r: edit_json(r / "meta/info.json", video_path="videos/{camera}.mp4"), "cannot be filled in.*camera"
    ),
    "no data files": (lambda r: shutil.rmtree(r / "data"), "no data files"),
    "no episode table": (lambda r: shutil.rmtree(r / "meta/episodes"), "table of episodes is missing"),
    "no rows' episode": (_drop("episode_index"), "no column `episode_index`"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_what_to_do(name: str, copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    edit, words = REFUSED[name]
    edit(root)
    for bad_episodes in ("fail", "skip"):
        with pytest.raises(ValueError, match=words):
            open_dataset(root, bad_episodes=bad_episodes)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="metadata file is missing"):
        open_dataset(tmp_path / "nowhere")


def test_no_good_episode_left(copied: Callable[[str], Path]) -> None:
    root = copied("v3.0")
    shutil.rmtree(root / "videos")
    with pytest.raises(BadDataset, match=r"10 problem\(s\)"):
        open_dataset(root, bad_episodes="skip")


def test_wanted_columns_and_cameras_must_exist(made: Callable[[str], Path], copied: Callable[[str], Path]) -> None:
    with pytest.raises(BadDataset, match=r"no column `actions`.*did you mean `action`"):
        open_dataset(made("v3.0"), columns=["actions"])
    with pytest.raises(BadDataset, match=r"did you mean `observation\.images\.top`"):
        open_dataset(made("v3.0"), cameras=["observation.image.top"])
    root = copied("v3.0")
    _declare_depth(root)
    with pytest.raises(BadDataset, match="is a depth map"):
        open_dataset(root, cameras=["observation.images.depth"])


def test_every_problem_has_its_five_parts() -> None:
    problem = Problem("error", "k", "what", "value", "expected", "do this", file="f", episode=3, camera="c")
    assert str(problem) == "what: value, expected expected (episode 3, camera `c`, file f); do this"
    assert problem.to_json()["kind"] == "k"


# ── the sets of a folder, if one is given ────────────────────────────────────────────────────────────────────────────


def _given() -> list[Path]:
    folder = os.environ.get("PISTON_DATASETS")
    return sorted(path.parent.parent for path in Path(folder).glob("*/meta/info.json")) if folder else []


@pytest.mark.parametrize("root", _given(), ids=lambda path: path.name)
def test_given_data_sets(root: Path) -> None:
    """Set PISTON_DATASETS to a folder of data sets: each is opened, its frames compared with a sequential decode."""
    ds = open_dataset(root)
    info = json.loads((root / "meta/info.json").read_text())
    assert (ds.num_episodes, ds.num_frames) == (info["total_episodes"], info["total_frames"])
    assert ds.problems == ()
    rows = np.random.default_rng(0).permutation(ds.num_frames)[:40]
    for key in ds.image_keys:
        if ds.features[key]["dtype"] == "image":
            assert ds.images(key, rows).shape[1:] == (*(image_size(ds.features[key]) or ()), 3)
            continue
        files, file, frame = ds.video_frames(key, rows)
        for n in np.unique(file):
            mine = file == n
            np.testing.assert_array_equal(ds.images(key, rows[mine]), sequential(files[n])[frame[mine]])
