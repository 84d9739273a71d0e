"""Masks, positions, rotary embedding and attention against the reference's unit vectors and plain arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch

from piston.model.attention import attend, attention_mask, never_empty, positions_of, rope_angles, rotate
from piston.model.gemma import AdaRMSNorm, RMSNorm, gated_residual
from piston.model.layers import gelu, unmasked_attention
from piston.model.pi0 import time_embedding
from piston.model.siglip import LayerNorm


@pytest.fixture(scope="module")
def units(golden: Path) -> dict[str, torch.Tensor]:
    with np.load(golden / "units.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def close(ours: torch.Tensor, reference: torch.Tensor, relative: float) -> None:
    error = (ours.float() - reference.float()).abs().max() / reference.float().abs().max()
    assert error <= relative, f"relative error {error:.2e} above {relative:.0e}"


DTYPES = [("float32", torch.float32, 2e-6), ("bfloat16", torch.bfloat16, 8e-3)]  # bfloat16: one rounding step


@pytest.mark.parametrize("case", ["unit", "small", "offset"])
@pytest.mark.parametrize(("name", "dtype", "tolerance"), DTYPES)
def test_norms(units: dict[str, torch.Tensor], case: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
    x = units[f"norm/{case}/x"].to(dtype)
    rms = RMSNorm(64)
    rms.load_state_dict({"scale": units["norm/rms_scale"]})
    close(rms(x)[0], units[f"norm/{case}/rms_{name}"], tolerance)

    ada = AdaRMSNorm(64)
    kernel, bias = units["norm/ada_kernel"], units["norm/ada_bias"]
    ada.modulation.weight = torch.nn.Parameter(kernel.T.contiguous())
    ada.modulation.bias = torch.nn.Parameter(bias)
    out, gate = ada(x, units["norm/cond"])
    close(out, units[f"norm/{case}/ada_{name}"], tolerance)
    close(gate, units[f"norm/{case}/ada_gate_{name}"], tolerance)

    layer = LayerNorm(64)
    layer.load_state_dict({"weight": units["norm/ln_scale"], "bias": units["norm/ln_bias"]})
    close(layer(x), units[f"norm/{case}/ln_{name}"], tolerance)


@pytest.mark.parametrize("head", [16, 256])
@pytest.mark.parametrize(("name", "dtype", "tolerance"), DTYPES)
def test_rope(units: dict[str, torch.Tensor], head: int, name: str, dtype: torch.dtype, tolerance: float) -> None:
    positions = units[f"rope/h{head}/positions"]
    rotated = rotate(units[f"rope/h{head}/x"].to(dtype), *rope_angles(positions, head))
    assert rotated.dtype == dtype
    close(rotated, units[f"rope/h{head}/y_{name}"], tolerance)


@pytest.mark.parametrize("width", [32, 48, 1024])
def test_time_embedding_is_exact(units: dict[str, torch.Tensor], width: int) -> None:
    embedding = time_embedding(units["posemb/time"], width)
    torch.testing.assert_close(embedding, units[f"posemb/dim{width}"], rtol=0, atol=2e-7)


def test_gelu(units: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(gelu(units["act/x"]), units["act/gelu"], rtol=1e-5, atol=1e-6)
    # Bit-equal in bfloat16, but for tanh's own last bit.
    differing = (gelu(units["act/x"].bfloat16()).float() != units["act/gelu_bfloat16"]).float().mean()
    assert differing <= 0.02


@pytest.mark.parametrize(("name", "dtype", "tolerance"), DTYPES)
def test_gated_residual(units: dict[str, torch.Tensor], name: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y, gate = (units[f"gated/{k}"].to(dtype) for k in ("x", "y", "gate"))
    close(gated_residual(x, y, gate), units[f"gated/out_{name}"], tolerance)


@pytest.mark.parametrize("case", range(4))
def test_masks(units: dict[str, torch.Tensor], case: int) -> None:
    mask = attention_mask(units[f"mask/{case}/input_mask"], units[f"mask/{case}/mask_ar"])
    assert torch.equal(mask, units[f"mask/{case}/attn_mask"])


def test_positions_skip_masked_tokens() -> None:
    valid = torch.tensor([[False, True, True, False, True]])
    assert positions_of(valid).tolist() == [[-1, 0, 1, 1, 2]]


def test_attend_equals_softmax_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, n, h, 8), generator=g) for n, h in ((5, 4), (6, 2), (6, 2)))
    mask = never_empty(torch.rand((2, 5, 6), generator=g) < 0.5)
    grouped_k, grouped_v = (t.repeat_interleave(2, dim=2) for t in (k, v))
    logits = torch.einsum("bnqe,bmqe->bqnm", q, grouped_k).masked_fill(~mask[:, None], -torch.inf)
    expected = torch.einsum("bqnm,bmqe->bnqe", logits.softmax(-1), grouped_v)
    torch.testing.assert_close(attend(q, k, v, mask), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_tower_attention_rounds_every_operation() -> None:
    """By hand: logits, exponentials, their sum and the quotient each rounded to bfloat16."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 3, 2, 4), generator=g).bfloat16() for _ in range(3))
    logits = torch.einsum("bnqe,bmqe->bqnm", q.double(), k.double()).bfloat16()
    exponentials = (logits - logits.amax(-1, keepdim=True)).float().exp().bfloat16()
    weights = (exponentials.double() / exponentials.double().sum(-1, keepdim=True).bfloat16().double()).bfloat16()
    expected = torch.einsum("bqnm,bmqe->bnqe", weights.double(), v.double()).bfloat16()
    assert torch.equal(unmasked_attention(q, k, v), expected)
