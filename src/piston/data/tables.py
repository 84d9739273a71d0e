"""Parquet files → numpy columns: scalars, fixed-size, variable and nested lists, declared shapes, nulls as NaN.

Images stored in the tables are not read here (see stills.py): the memory held is that of the low-dimensional columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Int64

from piston.data.problems import Fault, file_fault

READERS = 8  # threads reading files side by side: they wait for the disk more than they compute


class TableFault(ValueError):
    """A parquet file that cannot be read; `fault` says why."""

    def __init__(self, path: Path, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault.problem(file=str(path))))


def open_table(path: Path, *, buffer_size: int = 0) -> pq.ParquetFile:
    """The file, its footer read. Raises TableFault if it is absent, empty, an LFS pointer or has no footer.

    `buffer_size` > 0 streams columns with a buffer of so many bytes instead of reading them whole.
    """
    fault = file_fault(path, "table")
    if fault is not None:
        raise TableFault(path, fault)
    try:
        return pq.ParquetFile(path, buffer_size=buffer_size, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        fault = Fault(
            "unreadable-table",
            "parquet file cannot be opened",
            str(error).splitlines()[0],
            "a complete parquet file",
            "its writer was stopped before the footer was written, or the copy is incomplete: copy it again, or leave "
            "its episodes out (bad_episodes=skip)",
        )
        raise TableFault(path, fault) from error


def read_table(path: Path, wanted: Callable[[str], bool]) -> tuple[pa.Table, int, frozenset[str]]:
    """The wanted columns of a file, its number of rows, and the names of all of its columns. Raises TableFault."""
    try:
        with open_table(path) as table:
            present = table.schema_arrow.names
            names = [name for name in present if wanted(name)]
            return (
                table.read(columns=names, use_threads=False).select(names),
                table.metadata.num_rows,
                frozenset(present),
            )
    except (pa.ArrowException, OSError) as error:
        fault = Fault(
            "unreadable-table",
            "parquet file cannot be read",
            str(error).splitlines()[0],
            "whole column data",
            "the file is damaged: copy it again, or leave its episodes out (bad_episodes=skip)",
        )
        raise TableFault(path, fault) from error


@dataclass(frozen=True)
class FilePart:
    """What one data file holds of the wanted columns."""

    rows: int
    names: frozenset[str]  # all columns the file has
    columns: dict[str, np.ndarray]
    wrong_shape: dict[str, Bool[np.ndarray, "n"]]  # rows whose value has another shape than declared
    fault: Fault | None = None


def read_part(path: Path, shapes: Mapping[str, tuple[int, ...] | None]) -> FilePart:
    """Reads the wanted columns that the file has. A file that cannot be read gives no rows and a fault."""
    try:
        table, rows, present = read_table(path, shapes.__contains__)
    except TableFault as error:
        return FilePart(0, frozenset(), {}, {}, error.fault)
    columns, wrong = {}, {}
    for name in table.column_names:
        values, bad = to_numpy(table.column(name), shapes[name])
        if values is not None:
            columns[name] = values
            if bad is not None:
                wrong[name] = bad
    return FilePart(rows, present, columns, wrong)


def read_parts(paths: Sequence[Path], shapes: Mapping[str, tuple[int, ...] | None]) -> list[FilePart]:
    """`read_part` of every file, several at a time."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda path: read_part(path, shapes), paths))


def stacked(parts: Sequence[FilePart], name: str) -> tuple[np.ndarray, Int64[np.ndarray, "m"]] | None:
    """One column over all files, and the positions of the files that lack it (their rows are NaN, 0 or "").

    None if no file has it. Takes the pieces out of the parts, so that the column is in memory twice only while it is
    joined.
    """
    found = [part.columns[name] for part in parts if name in part.columns]
    if not found:
        return None
    dtype, tail = np.result_type(*found), found[0].shape[1:]
    filler: float | int | str = {"f": np.nan, "O": ""}.get(dtype.kind, 0)
    pieces, lacking = [], []
    for n, part in enumerate(parts):
        piece = part.columns.pop(name, None)
        if piece is None or piece.shape[1:] != tail:
            piece = np.full((part.rows, *tail), filler, dtype)
            if part.rows:
                lacking.append(n)
        pieces.append(piece)
    return np.concatenate(pieces), np.array(lacking, np.int64)


def to_numpy(
    column: pa.ChunkedArray, shape: tuple[int, ...] | None
) -> tuple[np.ndarray | None, Bool[np.ndarray, "n"] | None]:
    """A column as [rows, …], and which rows do not have the declared shape (None: all do).

    `shape` is the declared one (None: as stored). A scalar declared (1,) becomes [rows, 1]. Nulls are NaN. A column
    that is no array of numbers or texts (structs, bytes, maps) gives (None, None); so does one whose rows differ in
    length where no shape is declared.
    """
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty column stays chunked
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    leaf = _leaf_type(array.type)
    if pa.types.is_string(leaf) or pa.types.is_large_string(leaf):
        is_list = leaf != array.type
        return (None, None) if is_list else (np.array(array.to_pylist(), object), None)
    if not (pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)):
        return None, None
    dense = _dense(array)
    if dense is not None and shape is None:
        return dense, None
    if dense is not None and shape is not None and dense[:1].size == np.prod(shape, dtype=int):
        return dense.reshape(len(dense), *shape), None
    if dense is not None and len(dense) == 0:
        return np.empty((0, *(shape or ())), dense.dtype), None
    if shape is None:
        return None, None
    return _row_by_row(array, shape)


def _leaf_type(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _dense(array: pa.Array) -> np.ndarray | None:
    """The array if all of its rows have one shape and no list is null, else None."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if array.null_count:
            return None
        if pa.types.is_fixed_size_list(kind):
            width = kind.list_size
        else:
            lengths = np.diff(array.offsets.to_numpy())
            width = int(lengths[0]) if len(lengths) else 0
            if (lengths != width).any():
                return None
        inner = _dense(array.flatten())
        return None if inner is None else inner.reshape(len(array), width, *inner.shape[1:])
    if array.null_count:
        array = array.cast(pa.float64()) if not pa.types.is_floating(kind) else array
    return array.to_numpy(zero_copy_only=False)


def _row_by_row(array: pa.Array, shape: tuple[int, ...]) -> tuple[np.ndarray, Bool[np.ndarray, "n"]]:
    """The slow way for columns with null or ragged rows: those become NaN and are marked."""
    leaf = _leaf_type(array.type)
    floating = leaf.to_pandas_dtype() if pa.types.is_floating(leaf) else np.float64
    values = np.full((len(array), *shape), np.nan, floating)
    bad = np.zeros(len(array), bool)
    for n, row in enumerate(array.to_pylist()):
        flat = _flat(row)
        bad[n] = row is not None and len(flat) != values[n].size
        if row is not None and not bad[n]:
            values[n] = np.array(flat, floating).reshape(shape)
    return values, bad


def _flat(value: object) -> list[float]:
    if isinstance(value, Iterable):
        return [leaf for item in value for leaf in _flat(item)]
    return [np.nan if value is None else float(value)]  # pyright: ignore[reportArgumentType]
