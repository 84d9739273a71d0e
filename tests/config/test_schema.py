"""Values that cannot run are refused when a configuration is built, each naming the field and what was expected."""

import dataclasses
import math

import pytest

from piston.config.recipes import recipe
from piston.config.schema import LARGEST_BATCH, RunConfig

RUN: RunConfig = recipe("debug_cpu")


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("train", "batch_size", 0, "1 or more"),
        ("train", "batch_size", 10**20, f"at most {LARGEST_BATCH:,}"),
        ("train", "keep_period", 0, "1 or more"),
        ("train", "validation_interval", 0, "1 or more"),
        ("train", "validation_batches", -1, "1 or more"),
        ("train", "threads", 0, "1 or more"),
        ("train", "exp_name", "", "the name of one folder"),
        ("train", "exp_name", "..", "the name of one folder"),
        ("train", "exp_name", "../../elsewhere", "--train.checkpoint-dir"),
        ("train", "exp_name", "/elsewhere", "--train.checkpoint-dir"),
        ("optim", "b1", 1.0, "0 ≤ b1 < 1"),
        ("optim", "b2", math.nan, "0 ≤ b2 < 1"),
        ("optim", "eps", -1.0, "0 ≤ eps < inf"),
        ("optim", "weight_decay", math.inf, "0 ≤ weight_decay < inf"),
        ("optim", "decay_lr", -1e-3, "0 ≤ decay_lr"),
        ("optim", "timescale", 0.0, "timescale"),
        ("model", "image_size", (0, 0), "1 or more"),
    ],
)
def test_values_that_cannot_run(section: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(getattr(RUN, section), **{field: value})
    assert field in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("name", ["width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"])
def test_a_network_of_no_size(name: str) -> None:
    for part in (RUN.model.paligemma, RUN.model.siglip):
        if hasattr(part, name):
            with pytest.raises(ValueError, match=f"{name} of .* is 0; it must be 1 or more"):
                dataclasses.replace(part, **{name: 0})
    with pytest.raises(ValueError, match="patch_size"):
        dataclasses.replace(RUN.model.siglip, patch_size=(14, 0))


def test_resume_and_overwrite_together_name_the_options() -> None:
    with pytest.raises(ValueError, match=r"--train\.no-resume or --train\.no-overwrite"):
        dataclasses.replace(RUN.train, resume=True, overwrite=True)
