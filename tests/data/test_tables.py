"""Parquet columns of every shape become arrays; what is no array is said so; files that cannot be read are named."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.data.tables import TableFault, open_table, read_parts, stacked, to_numpy


def column(values: Sequence[object], kind: pa.DataType) -> pa.ChunkedArray:
    """Two chunks, as a file with two row groups gives."""
    half = len(values) // 2
    return pa.chunked_array([pa.array(values[:half], kind), pa.array(values[half:], kind)], kind)


VECTORS: list[object] = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32(), 2), pa.list_(pa.float32()), pa.large_list(pa.float32())], ids=str
)
@pytest.mark.parametrize("shape", [(2,), None])
def test_lists_of_one_length(kind: pa.DataType, shape: tuple[int, ...] | None) -> None:
    values, bad = to_numpy(column(VECTORS, kind), shape)
    assert bad is None
    assert values is not None
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, [[1, 2], [3, 4], [5, 6]])


def test_scalars_take_the_declared_shape() -> None:
    for shape, expected in (((1,), (3, 1)), (None, (3,)), ((), (3,))):
        values, bad = to_numpy(column([1, 2, 3], pa.int64()), shape)
        assert values is not None
        assert (values.shape, values.dtype, bad) == (expected, np.int64, None)


def test_nested_lists_and_flat_ones_of_a_matrix() -> None:
    rows: list[object] = [[[1, 2, 3], [4, 5, 6]]] * 2
    nested, _ = to_numpy(column(rows, pa.list_(pa.list_(pa.float32(), 3), 2)), (2, 3))
    loose, _ = to_numpy(column(rows, pa.list_(pa.list_(pa.float32()))), (2, 3))
    flat, _ = to_numpy(column([[1, 2, 3, 4, 5, 6]] * 2, pa.list_(pa.float32())), (2, 3))
    for values in (nested, loose, flat):
        np.testing.assert_array_equal(values, np.array(rows, np.float32))


def test_sliced_columns_are_read_from_their_own_start() -> None:
    for kind in (pa.list_(pa.float32(), 2), pa.list_(pa.float32())):
        values, _ = to_numpy(column(VECTORS, kind).slice(1, 2), (2,))
        np.testing.assert_array_equal(values, [[3, 4], [5, 6]])


def test_nulls_are_nan_and_other_shapes_are_marked() -> None:
    values, bad = to_numpy(column([[1, 2], None, [3], [4, None]], pa.list_(pa.float32())), (2,))
    assert values is not None
    assert bad is not None
    np.testing.assert_array_equal(values, [[1, 2], [np.nan] * 2, [np.nan] * 2, [4, np.nan]])
    assert bad.tolist() == [False, False, True, False]
    integers, _ = to_numpy(column([1, None, 3], pa.int64()), None)
    np.testing.assert_array_equal(integers, [1, np.nan, 3])


def test_texts_and_dictionaries() -> None:
    texts, _ = to_numpy(column(["a", None], pa.string()), (1,))
    assert texts is not None
    assert texts.tolist() == ["a", None]
    codes = pa.chunked_array([pa.array([5, 7, 5], pa.int32()).dictionary_encode()])
    numbers, _ = to_numpy(codes, None)
    assert numbers is not None
    assert numbers.tolist() == [5, 7, 5]


def test_what_is_no_array() -> None:
    struct = pa.struct({"bytes": pa.binary()})
    for values, kind in (([{"bytes": b""}], struct), ([b"x"], pa.binary()), ([["a"]], pa.list_(pa.string()))):
        assert to_numpy(column(values, kind), None) == (None, None)
    assert to_numpy(column([[1.0], [1.0, 2.0]], pa.list_(pa.float32())), None) == (None, None)


def test_empty_columns_keep_their_shape() -> None:
    values, _ = to_numpy(pa.chunked_array([], pa.list_(pa.float32(), 4)), (4,))
    assert values is not None
    assert values.shape == (0, 4)


def test_files_are_joined_and_lacking_ones_named(tmp_path: Path) -> None:
    vector = pa.list_(pa.float32(), 2)
    pq.write_table(pa.table({"a": pa.array([[1, 2]], vector), "n": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"n": pa.array([2, 3], pa.int32())}), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes(b"PAR1 cut short")
    pq.write_table(pa.table({"n": [4.5], "a": pa.array([[3, 4]], vector)}), tmp_path / "3.parquet")
    parts = read_parts([tmp_path / f"{n}.parquet" for n in range(4)], {"a": (2,), "n": None, "x": None})
    assert [part.rows for part in parts] == [1, 2, 0, 1]
    assert parts[2].fault is not None
    assert parts[2].fault.kind == "unreadable-table"
    joined = stacked(parts, "a")
    assert joined is not None
    np.testing.assert_array_equal(joined[0], [[1, 2], [np.nan] * 2, [np.nan] * 2, [3, 4]])
    assert joined[1].tolist() == [1]
    joined = stacked(parts, "n")
    assert joined is not None
    assert joined[0].tolist() == [1, 2, 3, 4.5]
    assert stacked(parts, "x") is None


def test_a_file_without_footer_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"n": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TableFault, match=r"cannot be opened.*cut\.parquet.*before the footer was written"):
        open_table(path)
