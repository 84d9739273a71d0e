"""Images stored inside parquet tables (PNG or JPEG bytes) → uint8 RGB, read when asked for, with bounded memory.

A parquet column is read by row groups. Small groups are read whole; a group of more than `BLOCK_BYTES` is streamed in
blocks, so that even a file with one giant row group never has all its images in memory. The latest blocks are kept.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from piston.data import handles
from piston.data.tables import open_table

BLOCK_BYTES = 8 << 20  # most bytes of images read at once
_KEPT_BYTES = 32 << 20  # blocks kept per thread, all files together
_STREAM_BUFFER = 1 << 20  # bytes read ahead from a column that is streamed


class _Blocks(threading.local):
    """The latest blocks this thread read: (file, column, first row) → cells, stalest first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[tuple[str, str, int], pa.Array] = OrderedDict()

    def find(self, path: str, key: str, row: int) -> pa.Scalar | None:
        for place, block in reversed(self.blocks.items()):
            if place[:2] == (path, key) and place[2] <= row < place[2] + len(block):
                self.blocks.move_to_end(place)
                return block[row - place[2]]
        return None

    def keep(self, path: str, key: str, first: int, block: pa.Array) -> None:
        self.blocks[path, key, first] = block
        while len(self.blocks) > 1 and sum(kept.nbytes for kept in self.blocks.values()) > _KEPT_BYTES:
            self.blocks.popitem(last=False)


_kept = _Blocks()


def read_stills(
    path: Path, key: str, rows: Sequence[int | np.integer] | np.ndarray, root: Path
) -> list[UInt8[np.ndarray, "_H _W 3"]]:
    """The images of column `key` at these rows of the file, in the order asked.

    Raises ValueError, naming file, column and row, where there is no readable image.
    """
    wanted, place = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    table = handles.opened(("stills", str(path)), lambda: StillTable(path))
    images = [_decode(table.cell(key, int(row)), path, key, int(row), root) for row in wanted]
    return [images[n] for n in place]


class StillTable:
    """One open parquet file with image columns. Ascending reads go through each block once. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = open_table(path, buffer_size=_STREAM_BUFFER)
        self._name = f"{path}:{path.stat().st_mtime_ns}"  # a file written anew has other blocks
        groups = [self._table.metadata.row_group(n).num_rows for n in range(self._table.metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)  # first row of each group
        self._streams: dict[str, _Stream] = {}

    def close(self) -> None:
        """Closes the file."""
        self._streams.clear()
        self._table.close()

    def cell(self, key: str, row: int) -> pa.Scalar:
        """The stored value of one row."""
        cell = _kept.find(self._name, key, row)
        if cell is None:
            try:
                first, block = self._load(key, row)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(
                    f"images cannot be read: column `{key}`, row {row} of {self._path} ({error}), expected whole "
                    "column data; the file is damaged: copy it again, or leave its episodes out (bad_episodes=skip)"
                ) from error
            _kept.keep(self._name, key, first, block)
            cell = block[row - first]
        return cell

    def _load(self, key: str, row: int) -> tuple[int, pa.Array]:
        """The block of column `key` that holds `row`, and the block's first row."""
        if key not in self._table.schema_arrow.names or not 0 <= row < self._starts[-1]:
            raise ValueError(
                f"{self._path} has no row {row} of column `{key}`; expected columns {self._table.schema_arrow.names} "
                f"and rows 0 … {self._starts[-1] - 1}: the file was changed, or lacks an image that info.json declares"
            )
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        first, size = int(self._starts[group]), self._group_bytes(group, key)
        if size <= BLOCK_BYTES:
            column = self._table.read_row_group(group, columns=[key], use_threads=False).column(key)
            return first, pa.concat_arrays(column.chunks)
        stream = self._streams.get(key)
        if stream is None or stream.group != group or row < stream.next_row:
            batch = max(1, int((self._starts[group + 1] - first) * BLOCK_BYTES / size))
            batches = self._table.iter_batches(batch, row_groups=[group], columns=[key], use_threads=False)
            stream = self._streams[key] = _Stream(group, first, batches, key)
        return stream.forward_to(row)

    def _group_bytes(self, group: int, key: str) -> int:
        columns = self._table.metadata.row_group(group)
        leaves = [columns.column(n) for n in range(columns.num_columns)]
        return sum(leaf.total_uncompressed_size for leaf in leaves if leaf.path_in_schema in (key, f"{key}.bytes"))


class _Stream:
    """A column of one row group, block after block."""

    def __init__(self, group: int, first: int, batches: Iterator[pa.RecordBatch], key: str) -> None:
        self.group, self.next_row, self._batches, self._key = group, first, batches, key

    def forward_to(self, row: int) -> tuple[int, pa.Array]:
        for batch in self._batches:
            first, self.next_row = self.next_row, self.next_row + batch.num_rows
            if row < self.next_row:
                return first, batch.column(self._key)
        raise AssertionError("the row lies inside the group")


def _decode(cell: pa.Scalar, path: Path, key: str, row: int, root: Path) -> UInt8[np.ndarray, "H W 3"]:
    value = cell.as_py()
    data, name = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    where = f"column `{key}`, row {row} of {path}"
    if data is None and name and (root / name).is_file():  # older sets keep the file beside the table
        data = (root / name).read_bytes()
    if not isinstance(data, bytes) or not data:
        raise ValueError(
            f"no image: {where} holds {'an empty value' if not data else type(data).__name__}, expected PNG or JPEG "
            "bytes; write the data set again, or leave its episode out (bad_episodes=skip)"
        )
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"image of mode {image.mode} in {where}, expected 8-bit colour; this is a depth map: do not map it "
                    "to a camera of the model"
                )
            return np.array(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(
            f"image cannot be decoded: {where} ({error}), expected PNG or JPEG bytes; write the data set again, or "
            "leave its episode out (bad_episodes=skip)"
        ) from error
