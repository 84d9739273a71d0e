"""`piston convert`: a checkpoint of any layout → one of another, exactly, whole or not at all.

Everything is compared before anything is written; tensors go through one at a time into a directory next to the
target, which is renamed when it is complete.
"""

import glob
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from piston.config.recipes import recipe
from piston.config.schema import ModelConfig, RunConfig
from piston.config.serialize import from_json
from piston.convert.extras import Extras, Given, collect, header, write_lerobot, write_openpi
from piston.convert.write import OrbaxWriter, SafetensorsWriter, TensorWriter
from piston.data.norm import save_norm_stats
from piston.train.checkpoint import NORM_STATS, RUN, STATE, open_checkpoint, seal
from piston.train.provenance import run_json
from piston.weights.files import Spec
from piston.weights.links import HOLDS_LORA, LAYOUTS, UNUSED_HEAD, Link, our_shapes
from piston.weights.merge import has_lora, merged, without_lora
from piston.weights.opened import Weights, open_weights

Target = Literal["openpi-jax", "openpi-pytorch", "lerobot", "piston"]
TARGETS: tuple[Target, ...] = get_args(Target)
Dtype = Literal["float32", "bfloat16", "float16"]
TOLD_BY_WEIGHTS = ("pi05", "paligemma", "action_expert", "siglip", "vocab_size", "image_size", "action_dim")


@dataclass(frozen=True)
class Conversion:
    """What was done: for the report, and for tests."""

    source: Weights
    extras: Extras
    notes: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    to: Target,
    *,
    dtype: Dtype | None = None,
    raw: bool = False,
    merge_lora: bool = False,
    given: Given | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes `source` as a `to` checkpoint at `target`.

    `dtype` None keeps every tensor's own. `raw`: last weights of a Piston checkpoint instead of EMA. Raises ValueError,
    leaving nothing behind, for a source that does not fit or a target that cannot hold it.
    """
    if target.exists():
        raise ValueError(f"{target} exists; expected a new directory: nothing is ever overwritten, choose another name")
    given = given or Given()
    if source.is_dir() and (source / "manifest.json").is_file():
        open_checkpoint(source)  # hashes
    weights = open_weights(source, like=given.run.model if given.run else None, raw=raw)
    _check_target(weights, to, merge_lora=merge_lora, given=given)
    extras, notes = collect(weights, given), []
    model = without_lora(extras.run.model) if merge_lora else extras.run.model
    extras = replace(extras, run=replace(extras.run, model=model))
    _clear_leftovers(target)
    temporary = target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        written = _write_weights(weights, temporary, to, model, header(extras), dtype, progress)
        _write_extras(temporary, to, extras, written, notes)
        temporary.rename(target)
    except OSError as error:
        raise ValueError(
            f"cannot write {target}: {error}; nothing of it is left: make room or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    notes += [f"not carried, since no model reads it: {name}" for name in weights.dropped]
    return Conversion(weights, extras, (*extras.notes, *notes))


def _clear_leftovers(target: Path) -> None:
    """Removes what killed conversions to this target left on this machine."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.{glob.escape(platform.node())}.*.tmp"):
        number = path.name.split(".")[-2]
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(path)
        except (PermissionError, ValueError):  # somebody's, and alive; not ours
            continue


def _check_target(weights: Weights, to: Target, *, merge_lora: bool, given: Given) -> None:
    if weights.layout == "paligemma":
        raise ValueError(
            f"{weights.path} is PaliGemma alone, without an action expert; expected a whole π0 or π0.5: start a "
            "training from it instead, --train.init PATH --train.init-except expert heads"
        )
    lora = has_lora(weights.config)
    if lora and not merge_lora and to not in HOLDS_LORA:
        raise ValueError(
            f"{weights.path} has LoRA adapters, which {to} has no place for; expected a model without: fold them into "
            f"the weights with --merge-lora, or convert to one of {', '.join(sorted(HOLDS_LORA))}"
        )
    if merge_lora and not lora:
        raise ValueError(f"{weights.path} has no LoRA adapters to merge; leave --merge-lora out")
    if given.run is not None:
        found = {name: getattr(weights.config, name) for name in TOLD_BY_WEIGHTS}
        wrong = [
            f"model.{name}: the recipe has {getattr(given.run.model, name)}, the weights {value}"
            for name, value in found.items()
            if getattr(given.run.model, name) != value
        ]
        if wrong:
            listing = "\n  ".join(wrong)
            raise ValueError(f"recipe {given.run.name} does not fit {weights.path}:\n  {listing}\nName another recipe")


# --- weights ---------------------------------------------------------------------------------------------------------


def _write_weights(
    weights: Weights, directory: Path, to: Target, model: ModelConfig, said: dict[str, str], dtype: Dtype | None,
    progress: Callable[[int, int], None] | None,
) -> set[torch.dtype]:  # fmt: skip
    """Every tensor of the layout, in the order in which the source has them; the dtypes written."""
    chosen = None if dtype is None else getattr(torch, dtype)
    dtypes = {name: chosen or weights.dtype(name) for name in our_shapes(model)}
    links = list(LAYOUTS[to](model))
    specs = _specs(links, model, dtypes)
    if to in ("openpi-pytorch", "lerobot"):
        prefix = "model." if to == "lerobot" else ""
        # Loaders want this head to be there; it is never evaluated.
        unused = (model.vocab_size, model.action_expert.width)
        specs[prefix + UNUSED_HEAD] = Spec(unused, dtypes["gemma.embedding"], "")
    writer: TensorWriter
    if to == "openpi-jax":
        writer = OrbaxWriter(directory / "params", specs, said)
    else:
        writer = SafetensorsWriter(directory / "model.safetensors", specs, {"format": "pt", **said})

    def ours(name: str) -> Tensor:
        plain = weights.read if not _merges(weights, model) else _merging_reader(weights)
        return plain(name).to(dtypes[name])

    links.sort(key=lambda link: _place(weights.links[link.ours[0]]))
    try:
        for done, link in enumerate(links):
            for ref, tensor in zip(link.theirs, link.to_theirs([ours(name) for name in link.ours]), strict=True):
                writer.write(ref, tensor.to(specs[ref[0]].dtype))
            if progress is not None:
                progress(done + 1, len(links))
        writer.finish()
    finally:
        writer.close()
    return set(dtypes.values())


def _merges(weights: Weights, model: ModelConfig) -> bool:
    return has_lora(weights.config) and not has_lora(model)


def _merging_reader(weights: Weights) -> Callable[[str], Tensor]:
    return lambda name: merged(weights.config, name, weights.read)


def _place(link: Link) -> tuple[str, int]:
    """Sorted by this, every array of the source is read once, layer by layer."""
    name, layer = link.theirs[0]
    return name, layer or 0


def _specs(links: list[Link], model: ModelConfig, dtypes: Mapping[str, torch.dtype]) -> dict[str, Spec]:
    """What will be written. A stacked array has the dtype that holds all its layers exactly."""
    ours = {name: torch.empty(shape, device="meta") for name, shape in our_shapes(model).items()}
    specs: dict[str, Spec] = {}
    for link in links:
        dtype = dtypes[link.ours[0]]
        for name in link.ours[1:]:
            dtype = torch.promote_types(dtype, dtypes[name])
        for (name, layer), tensor in zip(link.theirs, link.to_theirs([ours[n] for n in link.ours]), strict=True):
            before = specs.get(name)
            if before is not None and before.dtype is not None:
                dtype = torch.promote_types(dtype, before.dtype)
            shape = tuple(tensor.shape) if layer is None else (layer + 1, *tensor.shape)
            specs[name] = Spec(shape, dtype, "")
    return specs


# --- what travels along ----------------------------------------------------------------------------------------------


def _write_extras(directory: Path, to: Target, extras: Extras, written: set[torch.dtype], notes: list[str]) -> None:
    if to == "piston":
        _write_piston(directory, extras, notes)
        return
    if to == "lerobot":
        dtype = "bfloat16" if written == {torch.bfloat16} else "float32"
        write_lerobot(directory, extras, dtype, notes)
    else:
        write_openpi(directory, extras, notes, pytorch=to == "openpi-pytorch")


def _write_piston(directory: Path, extras: Extras, notes: list[str]) -> None:
    """run.json, statistics and tokenizer, sealed like a checkpoint of training at step 0."""
    (directory / RUN).write_text(run_json(extras.run))
    state = {"step": 0, "next_sample": 0, "pending": [], "identity": {}, "converted": True}
    (directory / STATE).write_text(json.dumps(state, indent=2))
    if extras.stats is not None:
        save_norm_stats(directory / NORM_STATS, extras.stats)
    if extras.tokenizer is not None:
        shutil.copyfile(extras.tokenizer, directory / f"tokenizer{extras.tokenizer.suffix}")
    missing = [
        f"{what} ({option})"
        for what, value, option in (
            ("norm statistics", extras.stats, "--norm-stats"), ("the tokenizer", extras.tokenizer, "--tokenizer"),
        )
        if value is None
    ]  # fmt: skip
    if missing:
        notes.append(f"`piston eval` also needs {' and '.join(missing)}; `--train.init` does not")
    seal(directory, 0)


# --- the command -----------------------------------------------------------------------------------------------------


def find_run(name: str) -> RunConfig:
    """A recipe by name, or the run of a run.json."""
    path = Path(name)
    return from_json(path.read_text()) if path.suffix == ".json" and path.is_file() else recipe(name)


def convert_command(
    source: Path, target: Path, to: Target, dtype: Dtype | None, raw: bool, merge_lora: bool, given: Given,
    console: Console,
) -> int:  # fmt: skip
    """Converts with a progress bar and says what was found, what travelled and what could not."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"writing {to}", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        result = convert(source, target, to, dtype=dtype, raw=raw, merge_lora=merge_lora, given=given, progress=show)
    console.print(describe(result.source), highlight=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"  note: {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"written: {target} ({to})", highlight=False, soft_wrap=True)
    return 0


def describe(weights: Weights) -> str:
    """One line: layout, model, size, dtypes, LoRA."""
    config = weights.config
    count = sum(_numel(shape) for name, shape in our_shapes(config).items() if name in weights.links)
    dtypes = ", ".join(f"{number} {str(kind).removeprefix('torch.')}" for kind, number in weights.dtypes.items())
    lora = ", LoRA" if has_lora(config) else ""
    kind = "π0.5" if config.pi05 else "π0"
    size = f"{count:,} parameters in {len(weights.links)} tensors ({dtypes})"
    return f"{weights.path}: {weights.layout}, {kind}{lora}, {size}"


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
