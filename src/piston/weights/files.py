"""Tensors in files, one at a time: safetensors (whole or in shards), npz, and orbax's zarr. No pickle is ever loaded.

Headers are read at once, tensors when they are asked for, so memory is bounded by the largest of them.
"""

import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMPY_DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "|V2": torch.bfloat16,
}  # fmt: skip
LARGEST_JSON = 100 * 2**20


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor on disk; `dtype` None: not floating point, `kind` says what it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str


@runtime_checkable
class TensorFiles(Protocol):
    """Named tensors on disk."""

    @property
    def specs(self) -> Mapping[str, Spec]: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def read(self, name: str, layer: int | None) -> Tensor:
        """A tensor, or one slice of its first axis."""
        ...


def refuse_pickle(path: Path) -> NoReturn:
    raise ValueError(
        f"{path} is a pickled file, which can run any code when it is loaded; expected safetensors, npz or an orbax "
        "directory: convert it to safetensors with the program that wrote it"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}; expected a JSON object: the checkpoint is damaged") from error
    return content


def stay_inside(directory: Path) -> None:
    """Raises ValueError if a link in the directory leads out of it.

    Links of a Hugging Face cache, from snapshots/<revision> into blobs of the same repository, are its normal form.
    """
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for entry in directory.rglob("*"):
        if entry.is_symlink() and not any(entry.resolve().is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{entry} is a link to {entry.resolve()}, outside of the checkpoint; expected files of {directory} "
                "only: copy the file there if you trust it"
            )


class Safetensors:
    """One safetensors file, or the shards of one model.

    Headers are checked by the safetensors library. Numbers are read, not mapped: a mapped file's pages stay in memory.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.metadata: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for file in files:
            for name, spec, start in self._open(file):
                if name in self.specs:
                    raise ValueError(
                        f"tensor {name} is in {file} and in another shard too; expected it once: the checkpoint is "
                        "damaged, download it again"
                    )
                self.specs[name], self._places[name] = spec, (file, start)

    def _open(self, file: Path) -> Iterator[tuple[str, Spec, int]]:
        if not file.is_file():
            raise ValueError(f"there is no file {file}, which the checkpoint names as its own: download it again")
        _refuse_other_kinds(file)
        try:
            with safe_open(file, framework="pt") as handle:
                self.metadata |= handle.metadata() or {}
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"cannot read {file} as safetensors: {error}; it is cut off, damaged or of another format: download it "
                "again"
            ) from error
        for name, entry in header.items():
            if name != "__metadata__":
                kind = str(entry["dtype"])
                spec = Spec(tuple(entry["shape"]), SAFETENSORS_DTYPES.get(kind), kind)
                yield name, spec, 8 + size + entry["data_offsets"][0]

    def read(self, name: str, layer: int | None) -> Tensor:
        spec, (file, start) = self.specs[name], self._places[name]
        assert spec.dtype is not None, f"{name} is {spec.kind}"
        shape = spec.shape if layer is None else spec.shape[1:]
        tensor = torch.empty(shape, dtype=spec.dtype)
        with file.open("rb") as opened:
            opened.seek(start + (layer or 0) * tensor.nbytes)
            got = opened.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.nbytes else 0
        if got != tensor.nbytes:
            raise ValueError(
                f"{file} ends inside of tensor {name} ({got} of {tensor.nbytes} bytes); it was cut off after it was "
                "opened: download it again"
            )
        return tensor


class Overlay:
    """The tensors of `above`, and those that only `below` has: an EMA of what was trained over what was frozen."""

    def __init__(self, above: TensorFiles, below: TensorFiles) -> None:
        self.metadata = {**below.metadata, **above.metadata}
        self.specs = {**below.specs, **above.specs}
        self._above, self._below = above, below

    def read(self, name: str, layer: int | None) -> Tensor:
        return (self._above if name in self._above.specs else self._below).read(name, layer)


def _refuse_other_kinds(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(9)
    if (start[8:] != b"{" and start[:1] == b"\x80") or start[:4] == b"PK\x03\x04":  # pickle; torch's zip of a pickle
        refuse_pickle(file)


class Npz:
    """Arrays of an npz file; object arrays are refused. The last array is kept, since layers are asked for in turn."""

    def __init__(self, file: Path) -> None:
        self.metadata: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        self._kept: tuple[str, Tensor] | None = None
        try:
            self._archive = zipfile.ZipFile(file)
            members = self._archive.infolist()
            if not all(member.filename.endswith(".npy") for member in members):
                refuse_pickle(file)
            for member in members:
                self.specs[member.filename.removesuffix(".npy")] = self._spec(member)
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise ValueError(f"cannot read {file} as npz: {error}; it is damaged: download it again") from error
        self._file = file

    def _spec(self, member: zipfile.ZipInfo) -> Spec:
        with self._archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        if dtype.hasobject:
            refuse_pickle(Path(f"{self._archive.filename}:{member.filename}"))
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= member.file_size - size < 2**16:
            raise ValueError(
                f"{self._archive.filename}: {member.filename} declares {size} bytes of numbers and holds "
                f"{member.file_size}; the file is damaged: download it again"
            )
        kind = str(dtype) if dtype.kind == "f" else dtype.str
        return Spec(tuple(shape), NUMPY_DTYPES.get(kind), kind)

    def read(self, name: str, layer: int | None) -> Tensor:
        if self._kept is None or self._kept[0] != name:
            self._kept = None
            with self._archive.open(f"{name}.npy") as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
            self._kept = (name, as_tensor(array))
        whole = self._kept[1]
        return whole if layer is None else whole[layer]


def as_tensor(array: np.ndarray) -> Tensor:
    """The numbers as they are; bfloat16, which numpy does not know, by its bits."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.itemsize == 2 and array.dtype.kind != "f":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensorstore() -> Any:
    """The library that reads and writes zarr. Raises ValueError, saying how to get it, if it is not installed."""
    try:
        import tensorstore as library
    except ImportError as error:
        raise ValueError(
            "openpi's JAX checkpoints need the package tensorstore, which is not installed; expected Piston's optional "
            "extra `jax`: pip install 'piston[jax]'"
        ) from error
    return library


def zarr_spec(directory: Path, name: str, *, zarr3: bool, ocdbt: bool) -> dict[str, Any]:
    """Where tensorstore finds an array of an orbax directory; `name` is its path joined by dots."""
    base = f"file://{directory.resolve()}/"
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if ocdbt else f"{base}{name}/"
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}


class Orbax:
    """The arrays of an orbax directory, by path below `params` ("PaliGemma/img/…")."""

    def __init__(self, directory: Path) -> None:
        self.metadata: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        self._arrays: dict[str, Any] = {}
        self._kept: tuple[str, Tensor] | None = None
        content = read_json(directory / "_METADATA")
        self.metadata |= {str(key): str(value) for key, value in (content.get("custom_metadata") or {}).items()}
        paths = [
            tuple(str(key["key"]) for key in leaf["key_metadata"]) for leaf in content.get("tree_metadata", {}).values()
        ]
        if not paths or any(path[0] != "params" for path in paths):
            raise ValueError(
                f"{directory} holds {sorted({path[0] for path in paths})}, expected orbax's `params` as openpi saves "
                "them: give the checkpoint's step directory or its params directory"
            )
        stripped = [path[1:] for path in paths]
        if all(path[-1] == "value" for path in stripped):  # as training writes them; released ones have none
            stripped = [path[:-1] for path in stripped]
        library, ocdbt = tensorstore(), (directory / "manifest.ocdbt").exists()
        opening = {}
        for path, name in zip(paths, stripped, strict=True):
            spec = zarr_spec(directory, ".".join(path), zarr3=bool(content.get("use_zarr3", False)), ocdbt=ocdbt)
            opening["/".join(name)] = library.open(spec, read=True, open=True)
        for name, future in opening.items():
            self._arrays[name] = array = self._checked(name, directory, future.result)
            kind = array.dtype.name
            self.specs[name] = Spec(tuple(array.shape), NUMPY_DTYPES.get(kind), kind)
        self._directory = directory

    @staticmethod
    def _checked(name: str, directory: Path, result: Any) -> Any:
        try:
            return result()
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(
                f"cannot read array {name} of {directory}: {str(error)[:300]}; the checkpoint is damaged: copy it again"
            ) from error

    def read(self, name: str, layer: int | None) -> Tensor:
        if self._kept is None or self._kept[0] != name:
            self._kept = None
            read = self._arrays[name].read()
            self._kept = (name, as_tensor(self._checked(name, self._directory, read.result)))
        whole = self._kept[1]
        return whole if layer is None else whole[layer]
