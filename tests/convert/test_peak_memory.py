"""A conversion at full width holds little more than its largest tensor."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piston.config.recipes import recipe
from piston.config.schema import RunConfig
from piston.config.serialize import to_json
from piston.convert.convert import TARGETS, Target
from piston.convert.write import SafetensorsWriter
from piston.weights.files import Spec
from piston.weights.links import our_shapes
from piston.weights.opened import RUN_KEY, open_weights

MEASURE = """
import resource, sys
from pathlib import Path
from piston.convert.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def full_width(*, depth: int) -> RunConfig:
    """π0.5 with the released model's widths and vocabulary, `depth` layers in every stack."""
    run = recipe("pi05_libero")
    model = run.model
    small = {
        name: dataclasses.replace(getattr(model, name), depth=depth)
        for name in ("paligemma", "action_expert", "siglip")
    }
    return dataclasses.replace(run, model=dataclasses.replace(model, **small))


def write_source(path: Path, run: RunConfig) -> int:
    """Random bfloat16 weights in our layout; the bytes of the largest tensor."""
    specs = {name: Spec(shape, torch.bfloat16, "") for name, shape in our_shapes(run.model).items()}
    writer = SafetensorsWriter(path, specs, {RUN_KEY: to_json(run)})
    for seed, (name, spec) in enumerate(specs.items()):
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(2**15), 2**15, spec.shape, generator=generator, dtype=torch.int16)
        writer.write((name, None), bits.view(torch.bfloat16))
    writer.finish()
    writer.close()
    return max(2 * torch.Size(spec.shape).numel() for spec in specs.values())


def peak(source: Path, target: Path, to: Target) -> int:
    """Bytes that a process which converts holds at most."""
    command = [sys.executable, "-c", MEASURE, str(source), str(target), to]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """From ours to each layout, and from each back: bit-equal, within 1.5 × the largest tensor + 1 GB."""
    run = full_width(depth=1)
    largest = write_source(tmp_path / "source.safetensors", run)
    found = {}
    for to in TARGETS:
        found[f"piston → {to}"] = peak(tmp_path / "source.safetensors", tmp_path / to, to)
        found[f"{to} → piston"] = peak(tmp_path / to, tmp_path / f"{to}-back", "piston")
        one, other = open_weights(tmp_path / "source.safetensors"), open_weights(tmp_path / f"{to}-back")
        for name in ("gemma.embedding", "gemma.blocks.0.prefix.gate_up.weight", "siglip.head.weight"):
            assert torch.equal(one.read(name).view(torch.int16), other.read(name).view(torch.int16)), (to, name)
    print({name: f"{size / 1e9:.2f} GB" for name, size in found.items()}, f"largest {largest / 1e9:.2f} GB")  # noqa: T201
    assert {name: size for name, size in found.items() if size > 1.5 * largest + 1e9} == {}
