"""Positions and attention against plain arithmetic; the reference's unit vectors are in tests/verify."""

import torch

from piston.model.attention import attend, never_empty, positions_of
from piston.model.layers import unmasked_attention


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
