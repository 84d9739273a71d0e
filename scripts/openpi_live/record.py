"""Writes a golden bundle: REQUEST.json → DIR/MANIFEST.json and .npz files, computed by openpi's JAX code on the CPU.

The request has the form of a manifest: `sets` with architectures, seeds, masks and curve settings. Runs in the venv
that `make live` builds; Piston starts it as a process and reads what it wrote.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import compute
import draw
import jax
import numpy as np
import reference
import samples
import units
from reference import Model

PACKAGES = (
    "rpent-openpi", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "augmax", "numpy", "ml-dtypes", "jaxtyping",
)  # fmt: skip
COMPRESSED_UP_TO = 2**28  # bytes; weights hardly shrink, and a GB takes a minute
log = logging.getLogger("record")


class Bundle:
    """The directory being written; the manifest comes last, so a bundle that has one is complete."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest: dict[str, Any] = {"versions": versions(), "sets": {}, "files": {}}
        root.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        path = self.root / f"{name}.npz"
        large = sum(v.nbytes for v in arrays.values()) > COMPRESSED_UP_TO
        (np.savez if large else np.savez_compressed)(path, **arrays)
        shapes = {k: {"shape": list(v.shape), "dtype": str(v.dtype)} for k, v in arrays.items()}
        self.manifest["files"][path.name] = {"bytes": path.stat().st_size, "arrays": shapes}
        log.info("%s: %d arrays, %.1f MB", path.name, len(arrays), path.stat().st_size / 1e6)

    def finish(self) -> None:
        (self.root / "MANIFEST.json").write_text(json.dumps(self.manifest, indent=1) + "\n")


def versions() -> dict[str, Any]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**found, "python": sys.version.split()[0], "backend": jax.default_backend()}


def record_model_set(bundle: Bundle, name: str, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inputs and results of one model set; returns its parameters."""
    arch = entry["arch"]
    shapes = Model(arch, "float32").shapes
    params = (
        reference.restored(entry["checkpoint"], shapes)
        if "checkpoint" in entry
        else draw.parameters(shapes, entry["seed"])
    )
    inputs = draw.given_inputs(arch, entry) if "inputs" in entry else draw.inputs(arch, entry, entry["seed"])
    bundle.write(f"{name}_inputs", {**{f"params/{k}": v for k, v in params.items()}, **inputs})
    for dtype in entry.get("dtypes", ("float32", "bfloat16")):
        bundle.write(
            f"{name}_{dtype}", compute.model_results(arch, params, inputs, dtype, entry.get("other_steps", [3]))
        )
    return params


def record_curve(bundle: Bundle, name: str, entry: dict[str, Any], base: dict[str, Any], params: Any) -> None:
    arch = base["arch"]
    rng = np.random.default_rng((entry["seed"], 2))
    like = {**base, **{k: entry[k] for k in ("batch", "prompt_lens", "image_masks") if k in entry}}
    drawn = draw.observations(arch, like, rng, (entry["nbatch"],))
    recorded = {f"batches/{k}": v for k, v in drawn.items()}
    chunk = (entry["steps"], like["batch"], arch["action_horizon"], arch["action_dim"])
    recorded["noise"] = rng.standard_normal(chunk).astype(np.float32)
    recorded["beta"], recorded["time"] = draw.flow_times((entry["steps"], like["batch"]), rng)
    scalars, saved = compute.training_curve(arch, params, recorded, entry, "float32")
    arrays = {**recorded, **{f"curve/{k}": v for k, v in scalars.items()}}
    arrays.update({f"{point}/{k}": v for point, values in saved.items() for k, v in values.items()})
    for variant in entry.get("variants", ()):
        clip = float(np.float32(np.median(scalars["grad_norm"]))) if variant == "curve_midclip" else None
        dtype = "bfloat16" if variant == "curve_bfloat16" else "float32"
        other, _ = compute.training_curve(arch, params, recorded, entry, dtype, clip)
        arrays.update({f"{variant}/{k}": v for k, v in other.items()})
        if clip is not None:
            arrays[f"{variant}/clip_gradient_norm"] = np.float32(clip)
    bundle.write(name, arrays)


def record(request: dict[str, Any], root: Path) -> None:
    bundle = Bundle(root)
    sets = request["sets"]
    params = {}
    for name, entry in sets.items():
        if "arch" in entry:
            params[name] = record_model_set(bundle, name, entry)
            bundle.manifest["sets"][name] = entry
    for name, entry in sets.items():
        if "base" in entry:
            record_curve(bundle, name, entry, sets[entry["base"]], params[entry["base"]])
            bundle.manifest["sets"][name] = entry
    if request.get("units", False):
        seed = request.get("seed", 0)
        bundle.write("units", units.unit_vectors(seed))
        bundle.write("schedule", units.schedules())
    if request.get("samples", False):
        seed = request.get("seed", 0)
        bundle.write("preprocess_resize", samples.resizes(seed))
        bundle.write("preprocess_observation_eval", samples.evaluation(seed))
        bundle.write("preprocess_augment", samples.augmentation(seed))
        bundle.write("preprocess_transforms", samples.sample_transforms(seed))
    bundle.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    record(json.loads(args.request.read_text()), args.out)


if __name__ == "__main__":
    main()
