"""A checkpoint of any layout as our parameters, by name: recognised by its content, compared strictly, read lazily."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from piston.config.schema import ModelConfig, RunConfig
from piston.config.serialize import from_json
from piston.weights.files import (
    Npz,
    Orbax,
    Overlay,
    Safetensors,
    Spec,
    TensorFiles,
    read_json,
    refuse_pickle,
    stay_inside,
)
from piston.weights.links import EMBEDDING, LAYOUTS, TIED_HEAD, UNUSED_HEAD, Link, our_shapes, their_shapes
from piston.weights.sizes import infer_model

RUN_KEY = "piston.run"  # in the header of files that Piston wrote: the run as JSON
SIGNS = (  # a name that only this layout has
    (r"model\.(paligemma_with_expert|state_proj|time_mlp_in)\.", "lerobot"),
    (r"paligemma_with_expert\.", "openpi-pytorch"),
    (r"(siglip|gemma)\.", "piston"),
    (r"llm\.(layers|embedder)\.", "rlinf"),
    (r"PaliGemma/", "openpi-jax"),
    (r"params/(img|llm)/", "paligemma"),
)


@dataclass(frozen=True)
class Weights:
    """A whole checkpoint, its tensors still on disk."""

    path: Path
    directory: Path  # where what travels with it lies
    layout: str
    config: ModelConfig
    run: RunConfig | None  # what the checkpoint says it is of
    guessed: tuple[str, ...]  # fields of `config` that nothing in the checkpoint told
    files: TensorFiles
    links: Mapping[str, Link]  # by parameter name
    dropped: tuple[str, ...]  # tensors that no model reads

    @property
    def dtypes(self) -> dict[torch.dtype, int]:
        """How many of our parameters have each dtype."""
        counts: dict[torch.dtype, int] = {}
        for name in self.links:
            counts[self.dtype(name)] = counts.get(self.dtype(name), 0) + 1
        return counts

    def dtype(self, name: str) -> torch.dtype:
        """A parameter's dtype; of one that is made from several tensors, the one that holds them all exactly."""
        dtypes = [self.files.specs[theirs].dtype for theirs, _ in self.links[name].theirs]
        first, *others = (dtype for dtype in dtypes if dtype is not None)
        for other in others:
            first = torch.promote_types(first, other)
        return first

    def read(self, name: str) -> Tensor:
        """One parameter, in the dtype it is stored in."""
        link = self.links[name]
        tensors = [self.files.read(theirs, layer) for theirs, layer in link.theirs]
        return link.to_ours(tensors)[link.ours.index(name)]


def open_weights(path: Path, *, like: ModelConfig | None = None, raw: bool = False) -> Weights:
    """Opens a checkpoint: openpi JAX or PyTorch, LeRobot, RLinf, Piston, or PaliGemma's npz.

    `like` tells what shapes cannot (sizes.py). `raw`: a Piston checkpoint's last weights instead of their EMA. Raises
    ValueError for what is missing, unexpected, mis-shaped or not floating point, all at once.
    """
    found = _find(path, raw=raw)
    layout = _layout(found)
    if raw and layout != "piston":
        raise ValueError(
            f"{path} is an {layout} checkpoint, which holds one set of weights; expected a Piston checkpoint for raw "
            "weights: leave --raw out"
        )
    run = _stated_run(found, layout)
    known = like if run is None else run.model
    if layout == "piston":
        if known is None:
            raise ValueError(
                f"{path} has neither a run.json nor Piston's header; expected a whole checkpoint directory"
            )
        config, guessed = known, ()
    else:
        inferred = infer_model(layout, _with_tied_head(layout, found.files.specs), known, str(path))
        config, guessed = inferred.config, inferred.guessed
    _agree(found, layout, config)
    links, dropped = _links(layout, config, found)
    by_name = {name: link for link in links for name in link.ours}
    return Weights(path, found.directory, layout, config, run, guessed, found.files, by_name, dropped)


# --- what a path holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    path: Path
    directory: Path
    files: TensorFiles


def _find(path: Path, *, raw: bool) -> _Found:
    if path.is_file():
        return _Found(path, path.parent, _single(path))
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint {path}; expected a directory, a .safetensors or an .npz file")
    stay_inside(path)
    if (path / "pretrained_model").is_dir():  # LeRobot's training checkpoints
        path = path / "pretrained_model"
    orbax = next((place for place in (path, path / "params") if (place / "_METADATA").is_file()), None)
    shards = _shards(path, raw=raw)
    if orbax is not None and shards:
        raise ValueError(
            f"{path} holds both an orbax directory and {shards[0].name}; expected one checkpoint: name the one you mean"
        )
    if orbax is not None:
        return _Found(path, path.parent if orbax == path and path.name == "params" else path, Orbax(orbax))
    if shards:
        averages = path / "ema.safetensors"
        if averages.is_file() and not raw:
            return _Found(path, path, Overlay(Safetensors([averages]), Safetensors(shards)))
        return _Found(path, path, Safetensors(shards))
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"):
        for pickled in sorted(path.glob(pattern)):
            refuse_pickle(pickled)
    raise ValueError(
        f"{path} holds no weights; expected model.safetensors (or its shards and index), or orbax's params with its "
        f"_METADATA; it has {sorted(entry.name for entry in path.iterdir())[:12]}"
    )


def _single(path: Path) -> TensorFiles:
    with path.open("rb") as opened:
        start = opened.read(4)
    return Npz(path) if start == b"PK\x03\x04" else Safetensors([path])


def _shards(path: Path, *, raw: bool) -> list[Path]:
    """The safetensors files of a directory: one, an index's shards, or a Piston checkpoint's weights."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file() and not single.is_file():
        content = read_json(index).get("weight_map")
        if not isinstance(content, dict) or not content:
            raise ValueError(f"{index} has no weight_map; expected tensor name → shard: the checkpoint is damaged")
        names = sorted({str(name) for name in content.values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names {outside}, outside of the checkpoint; expected files next to it")
        return [path / name for name in names]
    if not single.is_file():
        return []
    return [single]


def _layout(found: _Found) -> str:
    for pattern, layout in SIGNS:
        if any(re.match(pattern, name) for name in found.files.specs):
            return layout
    names = sorted(found.files.specs)
    raise ValueError(
        f"{found.path} holds {len(names)} tensors, {names[:3]} …, of no known layout; expected π0 or π0.5 as "
        f"{', '.join(LAYOUTS)} write them"
    )


def _stated_run(found: _Found, layout: str) -> RunConfig | None:
    """The run that the checkpoint itself states: in run.json, or in the header that Piston gives its files."""
    file = found.directory / "run.json"
    if layout == "piston" and file.is_file():
        return from_json(file.read_text())
    return from_json(found.files.metadata[RUN_KEY]) if RUN_KEY in found.files.metadata else None


def _agree(found: _Found, layout: str, config: ModelConfig) -> None:
    """Raises ValueError if config.json says another model than the tensors do."""
    file = found.directory / "config.json"
    if layout not in ("lerobot", "openpi-pytorch") or not file.is_file():
        return
    stated = read_json(file)
    kind = "pi05" if config.pi05 else "pi0"
    wrong = []
    if layout == "lerobot" and stated.get("type", kind) != kind:
        wrong.append(f"type is {stated['type']!r}, the tensors are {kind}'s")
    if layout == "lerobot" and stated.get("max_action_dim", config.action_dim) != config.action_dim:
        wrong.append(f"max_action_dim is {stated['max_action_dim']}, the tensors have {config.action_dim}")
    if layout == "openpi-pytorch" and stated.get("action_dim", config.action_dim) != config.action_dim:
        wrong.append(f"action_dim is {stated['action_dim']}, the tensors have {config.action_dim}")
    if wrong:
        raise ValueError(f"{file} contradicts the weights: {'; '.join(wrong)}; one of them is of another checkpoint")


# --- names and shapes ------------------------------------------------------------------------------------------------


def _links(layout: str, config: ModelConfig, found: _Found) -> tuple[list[Link], tuple[str, ...]]:
    specs = found.files.specs
    links = list(LAYOUTS[layout](config))
    prefix = {"openpi-pytorch": "", "lerobot": "model."}.get(layout)
    dropped: list[str] = []
    if prefix is not None:
        links, dropped = _tied(prefix, links, found.files)
    expected = their_shapes(config, links)
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in specs]
    for name, spec in specs.items():
        if name in dropped:
            continue
        if name not in expected and layout != "paligemma":
            problems.append(f"unexpected {name} {spec.shape}")
        elif name in expected and spec.shape != expected[name]:
            problems.append(f"shape of {name} is {spec.shape}, the model has {expected[name]}")
        elif name in expected and spec.dtype is None:
            problems.append(f"dtype of {name} is {spec.kind}, expected bfloat16, float16, float32 or float64")
    if problems:
        kind, listing = "π0.5" if config.pi05 else "π0", "\n  ".join(problems)
        raise ValueError(
            f"{found.path} is {layout} and looks like {kind}, but {len(problems)} tensors do not fit; expected exactly "
            f"{len(expected)}:\n  {listing}\nUse an undamaged checkpoint; nothing was read or written"
        )
    return links, tuple(dropped)


def _tied(prefix: str, links: Sequence[Link], files: TensorFiles) -> tuple[list[Link], list[str]]:
    """The links with the embedding under the name that the file has, and the tensors that say nothing."""
    head, table, unused = (prefix + name for name in (TIED_HEAD, EMBEDDING, UNUSED_HEAD))
    dropped = [unused] if unused in files.specs else []
    renamed = list(links)
    if table in files.specs:
        renamed = [
            dataclasses.replace(link, theirs=((table, None),)) if link.theirs == ((head, None),) else link
            for link in links
        ]
        if head in files.specs:
            if not _equal(files, head, table):
                raise ValueError(
                    f"tensors {head} and {table} differ, expected the same numbers: they are tied in every π0; the "
                    "checkpoint was changed by another program"
                )
            dropped.append(head)
    return renamed, dropped


def _with_tied_head(layout: str, specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
    """The tensors, with the embedding under its tied head's name wherever the file has it."""
    prefix = "model." if layout == "lerobot" else ""
    table = specs.get(prefix + EMBEDDING)
    return specs if table is None else {prefix + TIED_HEAD: table, **specs}


def _equal(files: TensorFiles, first: str, second: str) -> bool:
    if files.specs[first] != files.specs[second]:
        return False
    return torch.equal(files.read(first, None), files.read(second, None))


def missing_and_mismatched(weights: Weights, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(parameter, what is wrong) for everything in which a checkpoint differs from a model; nothing if it fits."""
    expected = our_shapes(model)
    held = {name: shape for name, shape in our_shapes(weights.config).items() if name in weights.links}
    for name, shape in expected.items():
        if name not in held:
            yield name, f"missing {name} {shape}"
        elif held[name] != shape:
            yield name, f"shape of {name} is {held[name]}, the model has {shape}"
    for name, shape in held.items():
        if name not in expected:
            yield name, f"unexpected {name} {shape}"
