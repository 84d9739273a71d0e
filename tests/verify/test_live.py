"""openpi's JAX code, live. What needs no JAX always runs; the rest runs where `make live` has built .venv-live."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piston.config.schema import GEMMA_VARIANTS, ModelConfig
from piston.verify import live
from piston.verify.bundle import model_config, open_bundle
from piston.verify.live import ARCHITECTURES, arch_of, checkpoint_request, model_set, record, request, verify_recorded

needs_jax = pytest.mark.skipif(
    not (live.VENV / ".installed").exists(), reason=f"{live.VENV} is not there; `make live` builds it"
)

# The smallest that still has several cameras, ragged prompts and grouped heads.
SMALLEST = dataclasses.replace(ARCHITECTURES["live_pi05"], cameras=("front", "wrist", "side"), image_size=(14, 28))


@pytest.mark.parametrize(
    "config",
    [*ARCHITECTURES.values(), ModelConfig(), ModelConfig(paligemma=GEMMA_VARIANTS["gemma_2b_lora"])],
)
def test_an_architecture_survives_the_manifest(config: ModelConfig) -> None:
    written = json.loads(json.dumps(arch_of(config)))
    back = model_config(written, config.dtype)
    assert dataclasses.replace(back, discrete_state_input=config.discrete_state_input) == config


@pytest.mark.parametrize("config", ARCHITECTURES.values())
def test_a_set_masks_the_middle_camera_and_has_ragged_prompts(config: ModelConfig) -> None:
    entry = model_set(config, seed=1)
    masks = np.array([entry["image_masks"][camera] for camera in config.cameras])
    assert list(masks[:, 0]) == [c != len(config.cameras) // 2 for c in range(len(config.cameras))]
    assert masks.any(0).all()
    assert len(set(entry["prompt_lens"])) == entry["batch"]
    assert max(entry["prompt_lens"]) == config.max_token_len


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="live_pi06"):
        request(("live_pi06",))


def test_a_missing_venv_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make live"):
        record(request(), tmp_path / "bundle", venv=tmp_path / "venv")


def test_a_bundle_is_never_overwritten(tmp_path: Path) -> None:
    python(tmp_path, "exit 0")
    (tmp_path / "MANIFEST.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a bundle already"):
        record(request(), tmp_path, venv=tmp_path / "venv")


def test_a_failing_recorder_is_quoted(tmp_path: Path) -> None:
    python(tmp_path, "echo compiling; echo 'XLA is out of patience' >&2; exit 3")
    lines: list[str] = []
    with pytest.raises(ValueError, match=r"exit code 3: .*XLA is out of patience"):
        record(request(), tmp_path / "bundle", venv=tmp_path / "venv", progress=lines.append)
    assert lines[0] == "compiling"


def test_the_recorder_sees_no_paths_or_flags_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/piston")
    monkeypatch.setenv("XLA_FLAGS", "--of_piston")
    python(tmp_path, 'env > "$3/environment"')
    record(request(), tmp_path / "bundle", venv=tmp_path / "venv")
    seen = (tmp_path / "bundle" / "environment").read_text()
    assert "/of/piston" not in seen
    assert "--of_piston" not in seen
    assert json.loads((tmp_path / "bundle" / "request.json").read_text()) == request()


@pytest.mark.parametrize("missing", ["checkpoint", "batch"])
def test_a_missing_checkpoint_or_batch_is_named(tmp_path: Path, missing: str) -> None:
    paths = {name: tmp_path / name for name in ("checkpoint", "batch")}
    for name, path in paths.items():
        if name != missing:
            path.touch()
    with pytest.raises(ValueError, match=f"{missing} does not exist"):
        checkpoint_request(SMALLEST, paths["checkpoint"], paths["batch"])


def python(root: Path, script: str) -> None:
    """A stand-in for the venv's interpreter."""
    path = root / "venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@needs_jax
def test_piston_equals_jax_on_a_fresh_architecture(tmp_path: Path) -> None:
    entry = {**model_set(SMALLEST, seed=int(os.environ.get("PISTON_LIVE_SEED", "0"))), "dtypes": ["float32"]}
    record({"sets": {"fresh": entry}}, tmp_path / "bundle")
    report = verify_recorded(tmp_path / "bundle")
    assert report.ok, report.verdict()
    assert not report.not_compared
    end_to_end = [row for row in report.rows if row.kind in ("tap", "sampling") and row.measure.startswith("max")]
    assert len(end_to_end) >= 40
    assert max(row.error for row in end_to_end) < 1e-5


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_piston_equals_jax_in_every_layer(tmp_path: Path, name: str) -> None:
    record(request((name,)), tmp_path / "bundle")
    report = verify_recorded(tmp_path / "bundle")
    assert report.ok, report.verdict()
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"tap", "sampling", "gradient", "unit", "preprocess"}
    assert ("curve" in kinds) is (name == live.CURVE_BASE)


@needs_jax
@pytest.mark.slow
def test_a_checkpoint_and_a_batch_of_ones_own(tmp_path: Path) -> None:
    """Records once, saves the weights as openpi saves checkpoints, and records again from that and the batch."""
    record({"sets": {"fresh": {**model_set(SMALLEST, seed=5), "dtypes": ["float32"]}}}, tmp_path / "first")
    inputs: dict[str, Any] = dict(open_bundle(tmp_path / "first").models[0].inputs)
    np.savez(tmp_path / "batch.npz", **{k: v for k, v in inputs.items() if not k.startswith("params/")})
    np.savez(tmp_path / "params.npz", **{k: v for k, v in inputs.items() if k.startswith("params/")})
    save = (
        "import sys, numpy as np, orbax.checkpoint as ocp; from flax import traverse_util;"
        "flat = dict(np.load(sys.argv[1])); tree = traverse_util.unflatten_dict(flat, sep='/');"
        "ocp.PyTreeCheckpointer().save(sys.argv[2], tree)"
    )
    python = str(live.VENV / "bin" / "python")
    subprocess.run([python, "-c", save, str(tmp_path / "params.npz"), str(tmp_path / "params")], check=True)
    content = checkpoint_request(SMALLEST, tmp_path / "params", tmp_path / "batch.npz")
    record(content, tmp_path / "second")
    report = verify_recorded(tmp_path / "second")
    assert report.ok, report.verdict()
    first, second = (open_bundle(tmp_path / name).models[0].reference("float32") for name in ("first", "second"))
    np.testing.assert_array_equal(first["v_t"], second["v_t"])
