"""The verifier says EQUAL on the golden bundles, and names the first difference when the model is wrong."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import piston.model.attention
import piston.model.gemma
import piston.model.layers
import piston.model.pi0
import piston.model.siglip
import piston.train.optim
from piston.verify.bundle import open_bundle
from piston.verify.curve import verify_curve
from piston.verify.execute import forward_and_gradient, load_model, sampling
from piston.verify.forward import verify_forward
from piston.verify.gradient import verify_gradient
from piston.verify.preprocess import verify_preprocess
from piston.verify.report import Report, Row, render
from piston.verify.units import verify_units


def save(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **dict(arrays))


def only(golden: Path, target: Path, *sets: str, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Path:
    """A bundle of some sets of the golden one."""
    manifest = json.loads((golden / "MANIFEST.json").read_text())
    manifest["sets"] = {name: manifest["sets"][name] for name in sets}
    target.mkdir(parents=True, exist_ok=True)
    (target / "MANIFEST.json").write_text(json.dumps(manifest))
    for name in sets:
        for suffix in ("_inputs", "", *(f"_{d}" for d in dtypes)):
            if (source := golden / f"{name}{suffix}.npz").exists():
                shutil.copy(source, target)
    for entry in manifest["sets"].values():
        entry["files"] = [f for f in entry.get("files", ()) if (target / f).exists()]
    (target / "MANIFEST.json").write_text(json.dumps(manifest))
    return target


def test_forward_equals_the_reference(golden: Path) -> None:
    report = verify_forward(open_bundle(golden))
    assert report.ok, report.verdict()
    assert {(r.set, r.dtype) for r in report.rows} == {
        ("tiny_pi05", "float32"), ("tiny_pi05", "bfloat16"), ("tiny_pi0", "float32"), ("tiny_pi0", "bfloat16"),
        ("tiny_pi05_lora", "float32"), ("units", "float32"), ("units", "bfloat16"), ("schedule", "float32"),
        ("preprocess", "float32"),
    }  # fmt: skip
    # The aim of the house: end to end within the tolerance of an injected time embedding.
    late = [r for r in report.rows if r.dtype == "float32" and r.kind == "tap" and r.tolerance > 0]
    assert max(r.error for r in late) <= 1e-5
    # The vision tower in bfloat16 is the reference's to the last bit, but where the float32 stem rounds the other way.
    tower = [r for r in report.rows if r.dtype == "bfloat16" and r.name.startswith("siglip/block")]
    assert all(r.error == pytest.approx(1.0, abs=0.02) for r in tower)
    assert report.not_compared == []


def test_units_and_schedules_equal_the_reference(golden: Path) -> None:
    rows = verify_units(golden)
    assert [r for r in rows if not r.ok] == []
    assert {r.name.split("/")[0] for r in rows} == {
        "norm", "rope", "act", "gated", "posemb", "mask", "lr", "tiny_lr", "rsqrt_lr",
    }  # fmt: skip


def test_preprocessing_equals_the_reference(golden: Path) -> None:
    rows = verify_preprocess(golden)
    assert [r for r in rows if not r.ok] == []
    assert {r.name.split("/")[0].rstrip("012") for r in rows} == {
        "resize", "observation", "augment", "normalize_zscore", "normalize_quantile", "unnormalize_zscore",
        "unnormalize_quantile", "delta", "pad", "discretize", "running", "running3d",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "epsilon"), [(piston.model.gemma, "RMS_NORM_EPS"), (piston.model.siglip, "LAYER_NORM_EPS")]
)
def test_a_wrong_epsilon_is_noticed(
    golden: Path, monkeypatch: pytest.MonkeyPatch, module: object, epsilon: str
) -> None:
    monkeypatch.setattr(module, epsilon, 1e-5)
    assert any(not row.ok for row in verify_units(golden))


def test_gradients_equal_the_reference(golden: Path) -> None:
    report = verify_gradient(open_bundle(golden))
    assert report.ok, report.verdict()
    params = [n for s in open_bundle(golden).models for n in s.params if s.name == "tiny_pi05"]
    names = {r.name for r in report.rows if r.set == "tiny_pi05" and r.dtype == "float32"}
    assert set(params) <= names, "every parameter's gradient is compared"
    assert report.not_compared == []


@pytest.mark.slow
def test_curve_equals_the_reference(golden: Path) -> None:
    report = verify_curve(open_bundle(golden))
    assert report.ok, report.verdict()
    losses = [r for r in report.rows if r.name.startswith("loss at step") and r.dtype == "float32"]
    assert len(losses) == 120
    assert max(r.error for r in losses) <= 1e-5


def shorter_curve(golden: Path, target: Path, steps: int) -> Path:
    """The golden curve cut to its first steps, float32 only, without the parameters after the last one."""
    only(golden, target, "tiny_pi05", "train_curve", dtypes=())
    with np.load(golden / "train_curve.npz") as archive:
        kept = {
            n: a[:steps] if n.split("/")[0] in ("noise", "time", "beta") or (n.startswith("curve/") and a.ndim) else a
            for n, a in ((n, archive[n]) for n in archive.files)
            if not n.startswith(("final_", "curve_"))
        }
    save(target / "train_curve.npz", kept)
    return target


def test_the_first_steps_of_the_curve_equal_the_reference(golden: Path, tmp_path: Path) -> None:
    report = verify_curve(open_bundle(shorter_curve(golden, tmp_path, 4)))
    assert report.ok, report.verdict()
    assert sum(r.name.startswith("params_after_1/") for r in report.rows) == 50


# --- a wrong model is noticed, and where -------------------------------------------------------------------------


def erf_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def float64_frequencies(width: int, device: torch.device) -> torch.Tensor:
    period = 0.004 * 1000.0 ** np.linspace(0, 1, width // 2)
    return torch.from_numpy((1 / period).astype(np.float32)).to(device)


def all_bidirectional(valid: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return valid[:, None, :] & valid[:, :, None]


def counting_padding(valid: torch.Tensor) -> torch.Tensor:
    return torch.arange(valid.shape[1], dtype=torch.int32).expand(valid.shape)


MISTAKES: dict[str, tuple[object, str, Callable, str]] = {
    "exact GELU in the tower": (piston.model.siglip, "gelu", erf_gelu, "siglip/block00_out"),
    "exact GELU in Gemma": (piston.model.gemma, "gelu", erf_gelu, "kv_k (prefix)"),
    "interleaved RoPE": (piston.model.gemma, "rotate", interleaved, "kv_k (prefix)"),
    "prefix sees suffix": (piston.model.pi0, "attention_mask", all_bidirectional, "attn_mask"),
    "padding counted": (piston.model.pi0, "positions_of", counting_padding, "positions"),
    "float64 time embedding": (piston.model.pi0, "_time_frequencies", float64_frequencies, "time_posemb"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_porting_mistake_is_named_where_it_starts(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    module, name, wrong, expected = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong)
    report = verify_forward(open_bundle(only(golden, tmp_path, "tiny_pi05", dtypes=("float32",))))
    if mistake == "float64 time embedding":  # inside the end-to-end tolerance, but never again inside the aim
        assert max(r.error for r in report.rows if r.name == "time_posemb") > 1e-5
        return
    failed = report.first_failure()
    assert failed is not None, f"{mistake} went unnoticed"
    assert failed.name == expected


def test_a_bfloat16_mistake_is_noticed(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating in bfloat16 (as the PyTorch ports do) is further from float32 than the reference."""

    def rounded_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    monkeypatch.setattr(piston.model.gemma, "rotate", rounded_rotation)
    report = verify_forward(open_bundle(only(golden, tmp_path, "tiny_pi05")))
    keys = next(r for r in report.rows if r.dtype == "bfloat16" and r.name == "kv_k (prefix)")
    monkeypatch.undo()
    right = verify_forward(open_bundle(tmp_path))
    assert keys.error > next(r for r in right.rows if r.dtype == "bfloat16" and r.name == "kv_k (prefix)").error


def test_a_clip_with_an_epsilon_or_a_missing_bias_correction_is_noticed(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(shorter_curve(golden, tmp_path, 3))
    monkeypatch.setattr(piston.train.optim, "learning_rate", lambda config, step: config.peak_lr * (step + 1) / 10)
    report = verify_curve(bundle)
    assert not report.ok
    failed = report.first_failure()
    assert failed is not None


# --- bundles of any architecture ---------------------------------------------------------------------------------

OTHER = {
    "pi05": False,
    "image_resolution": [28, 42],
    "image_keys": ["head_rgb", "right_wrist_0_rgb"],
    "vlm": {"width": 48, "depth": 2, "mlp_dim": 40, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
    "expert": {"width": 20, "depth": 2, "mlp_dim": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
    "lora_vlm": {"attn": {"rank": 2, "alpha": 3.0, "rslora": True}, "ffn": None},
    "lora_expert": None,
    "vocab": 37,
    "action_dim": 5,
    "action_horizon": 3,
    "max_token_len": 6,
    "siglip": {"width": 24, "depth": 1, "mlp_dim": 36, "num_heads": 3, "patch_size": [14, 14]},
}


@pytest.fixture
def other_bundle(tmp_path: Path) -> Path:
    """A bundle of another shape, filled in by our own model: shows what the reader accepts, not that we are right."""
    from piston.model.pi0 import Pi0
    from piston.model.weights import to_openpi_jax
    from piston.verify.bundle import model_config

    config = model_config(OTHER, "float32")
    rng = np.random.default_rng(0)
    shapes = {k: v.shape for k, v in to_openpi_jax(config, Pi0.on_meta(config).state_dict()).items()}
    inputs = {f"params/{k}": rng.normal(0, 0.2, shape).astype(np.float32) for k, shape in shapes.items()}
    for camera in config.cameras:
        inputs[f"images/{camera}"] = rng.uniform(-1, 1, (2, 28, 42, 3)).astype(np.float32)
        inputs[f"image_masks/{camera}"] = np.array([True, False])
    inputs |= {
        "state": rng.normal(size=(2, 5)).astype(np.float32),
        "tokenized_prompt": rng.integers(0, 37, (2, 6)).astype(np.int32),
        "tokenized_prompt_mask": np.arange(6)[None] < np.array([[6], [2]]),
        "time": np.array([0.3, 0.8], np.float32),
        **{n: rng.normal(size=(2, 3, 5)).astype(np.float32) for n in ("actions", "noise", "sample_noise")},
    }
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"sets": {"mine": {"arch": OTHER}}}))
    save(tmp_path / "mine_inputs.npz", inputs)
    model_set = open_bundle(tmp_path).models[0]
    for dtype in ("float32", "bfloat16"):
        model = load_model(model_set, dtype, "cpu")
        results = forward_and_gradient(model_set, model, "cpu") | sampling(model_set, model, "cpu", ())
        save(tmp_path / f"mine_{dtype}.npz", results)
    return tmp_path


def test_any_architecture_can_be_verified(other_bundle: Path) -> None:
    bundle = open_bundle(other_bundle)
    for report in (verify_forward(bundle), verify_gradient(bundle)):
        assert report.ok, report.verdict()
        assert {r.dtype for r in report.rows} == {"float32", "bfloat16"}
    assert not verify_curve(bundle).ok, "a bundle without a curve proves nothing about curves"


def test_one_wrong_entry_is_found(other_bundle: Path) -> None:
    path = other_bundle / "mine_float32.npz"
    with np.load(path) as archive:
        arrays = {n: archive[n] for n in archive.files}
    arrays["grads/PaliGemma/llm/layers/mlp_1/linear"][1, 3, 4] += (
        1e-3 * np.abs(arrays["grads/PaliGemma/llm/layers/mlp_1/linear"]).max()
    )
    arrays["positions"][1, 2] += 1
    save(path, arrays)
    bundle = open_bundle(other_bundle)
    gradient, forward = verify_gradient(bundle).first_failure(), verify_forward(bundle).first_failure()
    assert gradient is not None
    assert gradient.name == "PaliGemma/llm/layers/mlp_1/linear"
    assert forward is not None
    assert forward.name == "positions"


def test_not_a_number_is_never_equal() -> None:
    assert not Row("s", "float32", "tap", "x", float("nan"), 1e-5).ok


# --- damaged bundles ---------------------------------------------------------------------------------------------


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no MANIFEST.json in .*give --bundle"):
        open_bundle(tmp_path)


def test_manifest_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "MANIFEST.json").write_text("{")
    with pytest.raises(ValueError, match="is not a bundle manifest"):
        open_bundle(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"sets": 3}', '{"sets": []}'])
def test_manifest_is_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "MANIFEST.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest|no set"):
        open_bundle(tmp_path)


def test_a_listed_file_that_is_gone_is_no_equality(golden: Path, tmp_path: Path) -> None:
    bundle = only(golden, tmp_path, "tiny_pi0")
    (bundle / "tiny_pi0_float32.npz").unlink()
    with pytest.raises(ValueError, match=r"lists files that are not in .*tiny_pi0_float32.npz"):
        open_bundle(bundle)


def test_truncated_arrays(golden: Path, tmp_path: Path) -> None:
    bundle = only(golden, tmp_path, "tiny_pi0", dtypes=("float32",))
    path = bundle / "tiny_pi0_inputs.npz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"tiny_pi0_inputs.npz cannot be read"):
        verify_forward(open_bundle(bundle))


def test_missing_parameter_is_named(golden: Path, tmp_path: Path) -> None:
    bundle = only(golden, tmp_path, "tiny_pi0", dtypes=("float32",))
    path = bundle / "tiny_pi0_inputs.npz"
    with np.load(path) as archive:
        arrays = {n: archive[n] for n in archive.files if n != "params/state_proj/bias"}
    arrays["params/surprise"] = np.zeros(3, np.float32)
    save(path, arrays)
    with pytest.raises(ValueError, match=r"missing state_proj/bias[\s\S]*unexpected surprise"):
        verify_forward(open_bundle(bundle))


def test_report_renders_and_serialises() -> None:
    rows = [Row("s", "float32", "tap", "kv_k [x]", 1e-7, 1e-5), Row("s", "float32", "tap", "v_t", 1e-3, 1e-5)]
    report = Report("forward", "somewhere", rows)
    console = Console(width=120, record=True)
    render(report, console)
    text = console.export_text()
    assert "DIFFERENT, 1 of 2 arrays; first in data-flow order: s float32 v_t" in text
    assert "kv_k [x]" in text
    assert json.loads(report.to_json())["ok"] is False
    assert dataclasses.replace(report, rows=rows[:1]).ok


def changed(golden: Path, tmp_path: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """The π0 bundle with one file's arrays changed."""
    bundle = only(golden, tmp_path, "tiny_pi0", dtypes=("float32",))
    with np.load(bundle / file) as archive:
        arrays = {n: archive[n] for n in archive.files}
    change(arrays)
    save(bundle / file, arrays)
    return bundle


def test_a_missing_input_is_named(golden: Path, tmp_path: Path) -> None:
    bundle = changed(golden, tmp_path, "tiny_pi0_inputs.npz", lambda a: a.pop("images/left_wrist_0_rgb"))
    with pytest.raises(ValueError, match=r"tiny_pi0_inputs.npz has no array 'images/left_wrist_0_rgb'"):
        verify_forward(open_bundle(bundle))


def test_a_wrong_shape_is_named(golden: Path, tmp_path: Path) -> None:
    bundle = changed(golden, tmp_path / "in", "tiny_pi0_inputs.npz", lambda a: a.update(state=a["state"][:, :5]))
    with pytest.raises(ValueError, match=r"'state' of bundle file .* has shape \(3, 5\)"):
        verify_forward(open_bundle(bundle))
    bundle = changed(golden, tmp_path / "out", "tiny_pi0_float32.npz", lambda a: a.update(v_t=a["v_t"][:1]))
    with pytest.raises(ValueError, match=r"'v_t' of bundle file .* has shape \(1, 6, 8\)"):
        verify_forward(open_bundle(bundle))


def test_a_value_that_is_not_finite_is_named(golden: Path, tmp_path: Path) -> None:
    def poison(arrays: dict[str, Any]) -> None:
        arrays["noise"][0, 0, 0] = np.nan

    bundle = changed(golden, tmp_path, "tiny_pi0_inputs.npz", poison)
    with pytest.raises(ValueError, match=r"'noise' of bundle file .* holds 1 values that are not finite"):
        verify_gradient(open_bundle(bundle))
