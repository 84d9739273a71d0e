"""Tensors to files, one at a time and in any order, so that no more than one is in memory."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from piston.weights.files import Spec, tensorstore, zarr_spec
from piston.weights.links import Ref

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
JAX_NAMES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip
CHUNK_BYTES = 2**26  # of a zarr array; one decoded chunk is what a reader must hold at least
MAP_KEY = 2  # orbax's key_type of a dictionary key


@runtime_checkable
class TensorWriter(Protocol):
    """Takes every tensor, or layer of a stacked one, once."""

    def write(self, ref: Ref, tensor: Tensor) -> None: ...

    def finish(self) -> None:
        """Makes what was written whole, and waits until it is on the disk."""
        ...

    def close(self) -> None:
        """Lets go of open files."""
        ...


class SafetensorsWriter:
    """One safetensors file. Tensors that are never written are zero and take no room on most file systems."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        self._offsets: dict[str, tuple[int, Spec]] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, spec in sorted(specs.items(), key=lambda item: (-_itemsize(item[1]), item[0])):
            size = math.prod(spec.shape) * _itemsize(spec)
            assert spec.dtype is not None, f"{name} is {spec.kind}"
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, offset + size],
            }  # fmt: skip
            self._offsets[name] = (offset, spec)
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)
        self._file.truncate(self._start + offset)

    def write(self, ref: Ref, tensor: Tensor) -> None:
        name, layer = ref
        assert layer is None, "safetensors hold whole tensors"
        offset, spec = self._offsets[name]
        assert tuple(tensor.shape) == spec.shape, f"{name}: {tuple(tensor.shape)}, announced {spec.shape}"
        assert tensor.dtype == spec.dtype, f"{name}: {tensor.dtype}, announced {spec.dtype}"
        self._file.seek(self._start + offset)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class OrbaxWriter:
    """An orbax directory of zarr arrays with the top key `params`, as openpi's released checkpoints are."""

    def __init__(self, directory: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        self._metadata = dict(metadata)
        self._library = library = tensorstore()
        self._directory = directory
        directory.mkdir(parents=True)
        self._arrays: dict[str, Any] = {}
        leaves: dict[str, Any] = {}
        for name, spec in specs.items():
            assert spec.dtype is not None, f"{name} is {spec.kind}"
            path = ("params", *name.split("/"))
            self._arrays[name] = library.open(
                zarr_spec(directory, ".".join(path), zarr3=False, ocdbt=True),
                create=True,
                open=True,
                dtype=getattr(library, JAX_NAMES[spec.dtype]),
                shape=list(spec.shape),
                chunk_layout=library.ChunkLayout(chunk_shape=_chunk(spec)),
            ).result()
            leaves[str(path)] = {
                "key_metadata": [{"key": key, "key_type": MAP_KEY} for key in path],
                "value_metadata": {
                    "value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(spec.shape),
                },
            }  # fmt: skip
        self._leaves = leaves

    def write(self, ref: Ref, tensor: Tensor) -> None:
        name, layer = ref
        whole, numbers = self._arrays[name], _numpy(tensor)
        array = whole if layer is None else whole[layer]
        rows = max(1, CHUNK_BYTES // max(1, numbers[:1].nbytes)) if numbers.ndim else 1
        if numbers.nbytes <= CHUNK_BYTES:
            array.write(numbers).result()
            return
        step = _whole_chunks(rows, array.chunk_layout.write_chunk.shape[0])
        for start in range(0, len(numbers), step):  # the library holds all of a write until it is done
            stop = min(start + step, len(numbers))  # past the end is an error here
            array[start:stop].write(numbers[start:stop]).result()

    def close(self) -> None:
        self._arrays.clear()

    def finish(self) -> None:
        """The files that make it a checkpoint for orbax: what is in it, and that it is whole."""
        metadata = {
            "tree_metadata": self._leaves, "use_zarr3": False, "store_array_data_equal_to_fill_value": True,
            "custom_metadata": self._metadata or None,
        }  # fmt: skip
        (self._directory / "_METADATA").write_text(json.dumps(metadata))
        handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
        whole = {
            "item_handlers": handler, "metrics": {}, "performance_metrics": {}, "init_timestamp_nsecs": 0,
            "commit_timestamp_nsecs": 1, "custom_metadata": {},
        }  # fmt: skip
        (self._directory / "_CHECKPOINT_METADATA").write_text(json.dumps(whole))


def _whole_chunks(rows: int, chunk: int) -> int:
    """Rows per write: a multiple of the chunk, so that no chunk is written twice."""
    return max(chunk, rows // chunk * chunk)


def _itemsize(spec: Spec) -> int:
    assert spec.dtype is not None, spec.kind
    return spec.dtype.itemsize


def _chunk(spec: Spec) -> list[int]:
    """Leading axes cut so that a chunk has at most CHUNK_BYTES: a layer, or some rows of the embedding."""
    chunk, size = list(spec.shape), math.prod(spec.shape) * _itemsize(spec)
    for axis in range(len(chunk)):
        if size <= CHUNK_BYTES:
            break
        rows = size // chunk[axis]
        chunk[axis] = max(1, CHUNK_BYTES // rows)
        size = rows * chunk[axis]
    return chunk


def _numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    from ml_dtypes import bfloat16  # comes with tensorstore

    return tensor.view(torch.int16).numpy().view(bfloat16)
