"""Damaged bundles: each is a clear error and exit code 2, never a verdict and never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piston.cli import main
from piston.verify.report import relative_l2, relative_max

Arrays = dict[str, np.ndarray]
SET = "tiny_pi0"


@pytest.fixture
def bundle(golden: Path, tmp_path: Path) -> Path:
    """The smallest whole bundle: π0 in float32, and the curve with the set it starts from."""
    manifest = json.loads((golden / "MANIFEST.json").read_text())
    manifest["sets"] = {name: manifest["sets"][name] for name in (SET, "tiny_pi05", "train_curve")}
    files = [f"{SET}_inputs.npz", f"{SET}_float32.npz", "tiny_pi05_inputs.npz", "train_curve.npz"]
    for entry in manifest["sets"].values():
        entry["files"] = [name for name in entry.get("files", ()) if name in files]
    for name in files:
        shutil.copy(golden / name, tmp_path)
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    return tmp_path


def changed(file: str, change: Callable[[Arrays], Any]) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        with np.load(bundle / file) as archive:
            arrays = {name: archive[name] for name in archive.files}
        change(arrays)
        np.savez(bundle / file, **arrays)

    return damage


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        content = json.loads((bundle / "MANIFEST.json").read_text())
        change(content)
        (bundle / "MANIFEST.json").write_text(json.dumps(content))

    return damage


def cut(file: str, share: float) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        data = (bundle / file).read_bytes()
        (bundle / file).write_bytes(data[: int(len(data) * share)])

    return damage


def flipped(bundle: Path) -> None:
    """One byte in the middle of an array is another."""
    path = bundle / f"{SET}_float32.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data))


def poison(name: str, value: float = np.nan) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = np.full_like(arrays[name], value)

    return change


INPUTS, RESULTS, CURVE = f"{SET}_inputs.npz", f"{SET}_float32.npz", "train_curve.npz"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "no manifest": ("forward", lambda b: (b / "MANIFEST.json").unlink(), ("MANIFEST.json", "--bundle")),
    "empty manifest": ("forward", lambda b: (b / "MANIFEST.json").write_text(""), ("MANIFEST.json", "expected")),
    "truncated manifest": ("forward", cut("MANIFEST.json", 0.5), ("MANIFEST.json", "expected")),
    "manifest of bytes": (
        "forward", lambda b: (b / "MANIFEST.json").write_bytes(b"\xff\xfe\x00"), ("MANIFEST.json", "expected"),
    ),
    "sets that are no objects": ("forward", manifest(lambda m: m["sets"].update({SET: 3})), ("MANIFEST.json", SET)),
    "arch without a field": (
        "forward", manifest(lambda m: m["sets"][SET]["arch"].pop("vlm")), ("MANIFEST.json", "vlm", SET),
    ),
    "arch with a word for a number": (
        "forward", manifest(lambda m: m["sets"][SET]["arch"].update(vocab="many")), ("MANIFEST.json", "many", SET),
    ),
    "arch that is no object": ("forward", manifest(lambda m: m["sets"][SET].update(arch=[])), ("MANIFEST.json", SET)),
    "impossible arch": (
        "forward", manifest(lambda m: m["sets"][SET]["arch"]["vlm"].update(num_heads=0)), ("num_heads", SET),
    ),
    "curve without settings": (
        "curve", manifest(lambda m: m["sets"]["train_curve"].pop("sched")), ("MANIFEST.json", "sched", "train_curve"),
    ),
    "a listed file is gone": ("forward", lambda b: (b / RESULTS).unlink(), (RESULTS, "expected")),
    "truncated inputs": ("forward", cut(INPUTS, 0.6), (INPUTS, "cannot be read")),
    "truncated results": ("gradient", cut(RESULTS, 0.6), (RESULTS, "cannot be read")),
    "empty results": ("forward", cut(RESULTS, 0), (RESULTS, "cannot be read")),
    "a flipped byte": ("forward", flipped, (RESULTS, "cannot be read")),
    "a directory for a file": (
        "forward", lambda b: ((b / RESULTS).unlink(), (b / RESULTS).mkdir()), (RESULTS, "cannot be read"),
    ),
    "missing input": ("forward", changed(INPUTS, lambda a: a.pop("noise")), (INPUTS, "'noise'")),
    "missing parameter": (
        "gradient", changed(INPUTS, lambda a: a.pop("params/action_in_proj/bias")), ("action_in_proj/bias",),
    ),
    "missing curve array": ("curve", changed(CURVE, lambda a: a.pop("noise")), (CURVE, "'noise'")),
    "wrong shape of an input": (
        "forward", changed(INPUTS, lambda a: a.update(state=a["state"][:, :3])), (INPUTS, "'state'", "(3, 3)"),
    ),
    "wrong shape of a parameter": (
        "forward",
        changed(INPUTS, lambda a: a.update({"params/action_in_proj/bias": np.zeros(3, np.float32)})),
        ("action_in_proj/bias", "(3,)"),
    ),
    "wrong shape of a result": (
        "forward", changed(RESULTS, lambda a: a.update(v_t=a["v_t"][:, :2])), (RESULTS, "'v_t'"),
    ),
    "wrong shape of a gradient": (
        "gradient",
        changed(RESULTS, lambda a: a.update({"grads/action_out_proj/bias": np.zeros((2, 2), np.float32)})),
        (RESULTS, "action_out_proj/bias"),
    ),
    "NaN in the inputs": ("gradient", changed(INPUTS, poison("actions")), (INPUTS, "'actions'", "finite")),
    "infinity in the results": ("forward", changed(RESULTS, poison("v_t", np.inf)), (RESULTS, "'v_t'", "finite")),
    "NaN in a gradient": (
        "gradient", changed(RESULTS, poison("grads/action_out_proj/bias")), (RESULTS, "action_out_proj/bias", "finite"),
    ),
    "NaN in the curve": ("curve", changed(CURVE, poison("curve/loss")), (CURVE, "'curve/loss'", "finite")),
    "text for numbers": (
        "forward", changed(INPUTS, lambda a: a.update(state=np.full(a["state"].shape, "x"))), (INPUTS, "'state'"),
    ),
    "pickled objects": (
        "forward", changed(INPUTS, lambda a: a.update(state=np.array([{}], dtype=object))), (INPUTS, "cannot be read"),
    ),
    "ids outside the vocabulary": (
        "forward",
        changed(INPUTS, lambda a: a.update(tokenized_prompt=a["tokenized_prompt"] + 100_000)),
        (INPUTS, "'tokenized_prompt'"),
    ),
    "no samples": (
        "forward",
        changed(INPUTS, lambda a: a.update({k: v[:0] for k, v in a.items() if not k.startswith("params/")})),
        (INPUTS, "actions"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_ends_with_code_2(bundle: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    layer, spoil, words = DAMAGE[damage]
    spoil(bundle)
    with pytest.raises(SystemExit) as stop:
        main(["verify", layer, "--bundle", str(bundle)])
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert "Traceback" not in said
    for word in words:
        assert word in said, said
    assert "expected" in said or "asks for" in said or "computes" in said, said


def test_a_value_that_is_no_number_is_never_lost_in_a_large_array() -> None:
    reference = np.ones(10_000_000, np.float32)
    for place in (0, 5_000_000, -1):
        ours = reference.copy()
        ours[place] = np.nan
        assert np.isnan(relative_max(ours, reference))
        assert np.isnan(relative_l2(ours, reference))
