"""Images inside tables: exact, in the order asked, however the table is cut into row groups, with bounded memory."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_sets import code_frame, png
from PIL import Image

from piston.data import handles, stills
from piston.data.stills import read_stills

ROWS = 60
FRAMES = [np.random.default_rng(n).integers(0, 255, (8, 12, 3), np.uint8) for n in range(ROWS)]


def write(path: Path, *, row_group_size: int, plain: bool = False) -> Path:
    cells = [png(frame) for frame in FRAMES]
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = pa.array(cells, pa.binary()) if plain else pa.array([{"bytes": c, "path": None} for c in cells], struct)
    other = pa.array([{"bytes": png(code_frame(1, 0, n)), "path": None} for n in range(ROWS)], struct)
    table = pa.table({"camera.top": column, "camera.top.two": other, "n": list(range(ROWS))})
    pq.write_table(table, path, row_group_size=row_group_size, data_page_size=2000)
    return path


@pytest.mark.parametrize("row_group_size", [1, 7, ROWS])
@pytest.mark.parametrize("block_bytes", [3000, 8 << 20])
@pytest.mark.parametrize("plain", [False, True])
def test_images_are_exact_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_size: int, block_bytes: int, plain: bool
) -> None:
    monkeypatch.setattr(stills, "BLOCK_BYTES", block_bytes)
    path = write(tmp_path / "a.parquet", row_group_size=row_group_size, plain=plain)
    order = np.random.default_rng(0).permutation(ROWS)
    for rows in (range(ROWS), order, [5, 3, 5, 59, 0]):
        images = read_stills(path, "camera.top", rows, tmp_path)
        assert len(images) == len(rows)
        for row, image in zip(rows, images, strict=True):
            np.testing.assert_array_equal(image, FRAMES[row])
    for row in order[:20]:
        np.testing.assert_array_equal(read_stills(path, "camera.top", [row], tmp_path)[0], FRAMES[row])


def test_memory_is_bounded_for_one_giant_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "giant.parquet", row_group_size=ROWS)
    monkeypatch.setattr(stills, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(stills, "_KEPT_BYTES", 9000)
    stills._kept.blocks.clear()
    largest, kept = 0, 0
    for row in np.random.default_rng(1).permutation(ROWS):
        read_stills(path, "camera.top", [row], tmp_path)
        sizes = [block.nbytes for block in stills._kept.blocks.values()]
        largest, kept = max(largest, *sizes), max(kept, sum(sizes))
    whole = sum(len(png(frame)) for frame in FRAMES)
    assert largest < whole / 4
    assert kept < whole / 2


def test_ascending_reads_go_through_a_large_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "once.parquet", row_group_size=ROWS)
    monkeypatch.setattr(stills, "BLOCK_BYTES", 3000)
    stills._kept.blocks.clear()
    handles.close_all()
    passes = 0
    begin = stills._Stream.__init__

    def counted(self: stills._Stream, *args: object) -> None:
        nonlocal passes
        passes += 1
        begin(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(stills._Stream, "__init__", counted)
    for row in range(ROWS):
        read_stills(path, "camera.top", [row], tmp_path)
    assert passes == 1


def test_images_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png(FRAMES[0]))
    cell = {"bytes": None, "path": "images/a.png"}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"top": pa.array([cell], kind)}), tmp_path / "b.parquet")
    np.testing.assert_array_equal(read_stills(tmp_path / "b.parquet", "top", [0], tmp_path)[0], FRAMES[0])


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_grey_transparent_and_jpeg_images_become_rgb_and_depth_is_refused(tmp_path: Path) -> None:
    grey = Image.fromarray(np.full((4, 6), 77, np.uint8))
    clear = Image.fromarray(np.full((4, 6, 4), 200, np.uint8))
    jpeg = Image.fromarray(np.full((4, 6, 3), 90, np.uint8))
    depth = Image.fromarray(np.full((4, 6), 3000, np.uint16))
    cells = [encoded(grey, "PNG"), encoded(clear, "PNG"), encoded(jpeg, "JPEG"), encoded(depth, "PNG")]
    path = tmp_path / "modes.parquet"
    pq.write_table(pa.table({"top": pa.array(cells, pa.binary())}), path)
    images = read_stills(path, "top", [0, 1, 2], tmp_path)
    assert [image.shape for image in images] == [(4, 6, 3)] * 3
    assert [int(image[0, 0, 0]) for image in images] == [77, 200, 90]
    with pytest.raises(ValueError, match=r"mode I.*row 3 of .*modes\.parquet.*depth map"):
        read_stills(path, "top", [3], tmp_path)


def test_rows_and_columns_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "c.parquet", row_group_size=10)
    with pytest.raises(ValueError, match=r"no row 60 of column `camera\.top`"):
        read_stills(path, "camera.top", [60], tmp_path)
    with pytest.raises(ValueError, match="no row 0 of column `camera`"):
        read_stills(path, "camera", [0], tmp_path)
