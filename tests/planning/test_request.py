"""Bad input is refused where it is read: what is wrong, the value, what was expected, and what to do."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from piston.planning.case import CALIBRATION_SCHEMA, read_calibration, resolve
from piston.planning.gpus import CATALOGUE, find_gpu
from piston.planning.plan import make_plan
from piston.planning.request import Request


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": -4}, r"--batch is -4; .* positive"),
        ({"gpus": 0}, r"--gpus is 0; .* positive"),
        ({"nodes": 0}, r"--nodes is 0"),
        ({"cameras": -1}, r"--cameras is -1"),
        ({"price": -1.0}, r"--price is -1.0; .* non-negative"),
        ({"price": math.nan}, r"--price is nan"),
        ({"days": math.inf}, r"--days is inf"),
        ({"efficiency": 1.5}, r"--efficiency is 1.5; it is a share"),
        ({"overlap": 2.0}, r"--overlap is 2.0; it is a share"),
        ({"batch": 100, "gpus": 8}, r"--batch 100 is not a multiple of 8 GPUs .* use 96 or 104"),
        ({"batch": 4, "gpus": 8}, r"not a multiple of 8 GPUs .* use 8"),
        ({"budget": 100.0}, r"no --price; Piston ships no prices"),
        ({"steps": 10, "epochs": 1.0}, r"the work is given 2 times \(--steps, --epochs\)"),
        ({"steps": 10, "days": 1.0, "nodes": 2}, r"--steps, --days and --nodes are all given"),
        ({"data": Path("x"), "hours": 1.0}, r"--data and --hours are both given"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**options)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'H2000'; did you mean 'H200'"):
        make_plan(Request(gpu="H2000"))
    with pytest.raises(ValueError, match="did you mean 'pi05_libero'"):
        make_plan(Request(subject="pi05_liber"))


@pytest.mark.parametrize("name", ["h200", "NVIDIA H200", "rtx4090", "4090", "GeForce RTX 5090", "rtx-pro-6000"])
def test_gpu_names_are_forgiving(name: str) -> None:
    assert find_gpu(name).name in CATALOGUE


def test_gpu_figures_can_be_overridden() -> None:
    gpu = find_gpu("H200", memory=100.0, bfloat16=500.0)
    assert (gpu.memory, gpu.bfloat16, gpu.measured) == (100.0, 500.0, None)
    assert "given" in gpu.source
    with pytest.raises(ValueError, match="memory for GPU H200 is nan"):
        find_gpu("H200", memory=math.nan)


def test_every_gpu_has_a_source_and_a_year() -> None:
    for gpu in CATALOGUE.values():
        assert "20" in gpu.source
        assert gpu.bfloat16 >= gpu.float32 > 0
        assert gpu.memory > 0


PROFILE = {
    "schema": CALIBRATION_SCHEMA, "gpu": "H100", "gpus": 8, "batch": 256, "cameras": 3, "text": 200, "horizon": 10,
    "step_s": 1.0, "stages_s": {"data": 0.0, "forward": 0.3, "backward": 0.5, "optimizer": 0.05, "host": 0.15},
}  # fmt: skip


def profile(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE | changes))
    return path


def test_a_profile_becomes_the_anchor_and_the_walk(tmp_path: Path) -> None:
    case = resolve(Request(calibration=profile(tmp_path), gpu="H100"))
    assert case.fit is not None
    assert case.fit.slope == pytest.approx(0.85 / 256)
    assert case.fit.overhead == pytest.approx(0.15)
    walk = next(s for s in make_plan(case.request).sections if s.key == "bottleneck")
    assert walk.notes[0].startswith("Binding at profile at batch 256: backward (0.5 s of 1 s), then forward")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "x"}, "schema 'x'"),
        ({"step_s": -1}, "`step_s` is -1"),
        ({"stages_s": {}}, "`stages_s` is {}"),
        ({"stages_s": {"sleep": 1.0}}, "`stages_s` is"),
        ({"stages_s": {"data": math.nan}}, "`data` is nan"),
        ({"gpu": "H2"}, "unknown GPU"),
    ],
)
def test_bad_profiles(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_calibration(profile(tmp_path, **changes))
    (tmp_path / "broken.json").write_text("]")
    with pytest.raises(ValueError, match="not JSON"):
        read_calibration(tmp_path / "broken.json")
