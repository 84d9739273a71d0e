"""The roofline is a floor: no prediction is faster, and what binds follows the machine."""

from typing import Any

from piston.model.cost import flops
from piston.planning import formulas
from piston.planning.case import payload, resolve, settings
from piston.planning.request import Request
from piston.planning.roofline import bounds


def test_compute_is_the_models_flops_at_the_peak() -> None:
    case = resolve(Request())
    total = sum(b.compute for b in bounds(case))
    assert total * case.gpu.bfloat16 * 1e12 == flops(case.model).model * case.per_gpu


def test_no_prediction_is_below_the_floor() -> None:
    for gpu in ("H200", "RTX 4090", "B200"):
        case = resolve(Request(gpu=gpu, efficiency=1.0, checkpointing="none", kernels="compiled"))
        floor = max(sum(b.compute for b in bounds(case)), 0.0)
        step = formulas.step_seconds(payload(case)["flops"], settings(case, anchored=False))["step"]
        assert step >= floor * (1 - 1e-12)


def test_large_batches_are_bound_by_products_and_single_samples_by_memory() -> None:
    def bound_by(**shape: Any) -> dict[str, str]:
        return {b.name: b.by for b in bounds(resolve(Request(gpus=1, kernels="compiled", **shape)))}

    many, one = bound_by(batch=256), bound_by(batch=1, cameras=1, text=8, horizon=1)
    assert many["joint transformer"] == "matrix peak"
    assert one["joint transformer"] == "memory bandwidth"
    assert many["optimizer update"] == one["optimizer update"] == "memory bandwidth"


def test_the_update_moves_seven_words_and_nine_with_ema() -> None:
    case = resolve(Request(ema=True))
    plain = formulas.update_bytes(settings(case, anchored=False, choose={"ema": 0}))
    assert formulas.update_bytes(settings(case, anchored=False)) / plain == 9 / 7
