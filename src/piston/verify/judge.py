"""The tolerances, and the only code that turns two arrays into a verdict.

float32, relative to max |reference| of each array: 1e-5 before the time embedding; after it 1e-5 with the bundle's
time embedding and 1e-4 end to end; gradients 2e-5 and 2e-4. The reference's own noise floor is about a fifth of these.
A set can be so ill-conditioned that the reference itself is that far from exact arithmetic. Then a float64 run of the
same model is the referee, for errors up to 3 tolerances: ours may be at most 3 × as far from it as the reference is
(relative L2). Summation order alone moves that ratio between 0.7 and 2.4 on the shipped sets.

bfloat16: no further from the float32 results than 1.5 × the reference's own bfloat16 run (relative L2). Arrays the
reference keeps in float32 must be equal as in float32. The rounding noise of an array of a few numbers is one draw of
luck, so arrays under 256 elements are measured against the pooled distance of their kind where that is the larger.
"""

import numpy as np

from piston.verify.bundle import Arrays, Dtype
from piston.verify.report import Kind, Row, directions, relative_l2, relative_max

BEFORE_TIME = 1e-5
AFTER_TIME = {"injected": 1e-5, "end to end": 1e-4}
GRADIENT = {"injected": 2e-5, "end to end": 2e-4}
ZERO_GRADIENT = 1e-6  # absolute, where the exact gradient is zero
BFLOAT16_ZERO = 1e-3  # the same in bfloat16, of the largest gradient
BFLOAT16_RATIO = 1.5
REFEREE_RATIO = 3.0
REFEREE_REACH = 3.0  # the referee is heard up to this many tolerances; beyond it is no rounding noise
SMALL_ARRAY = 256


def exactly_zero_gradient(name: str) -> bool:
    """A bias on every key shifts a softmax row by a constant: the exact gradient is zero, files hold rounding noise."""
    return name.endswith("MultiHeadDotProductAttention_0/key/bias")


def exact(set_name: str, dtype: Dtype, kind: Kind, name: str, ours: np.ndarray, reference: np.ndarray) -> Row:
    """Masks and positions: every entry equal."""
    differing = float("inf") if ours.shape != reference.shape else float((ours != reference).sum())
    return Row(set_name, dtype, kind, name, differing, 0.0, "differing entries")


def float32(
    set_name: str,
    kind: Kind,
    name: str,
    ours: np.ndarray,
    reference: np.ndarray,
    tolerance: float,
    *,
    referee: np.ndarray | None = None,
    label: str | None = None,
) -> Row:
    """max |ours − reference| / max |reference| against `tolerance`, with a float64 referee where one is given."""
    label = label or name
    if kind == "gradient" and exactly_zero_gradient(name):
        error = max(float(np.abs(ours).max()), float(np.abs(reference).max()))
        return Row(set_name, "float32", kind, label, error, ZERO_GRADIENT, "max abs", "exact gradient is zero")
    error = relative_max(ours, reference)
    l2, (cosine, ratio) = relative_l2(ours, reference), directions(ours, reference)
    doubtful = tolerance < error <= REFEREE_REACH * tolerance
    if doubtful and referee is not None and relative_max(reference, referee) > tolerance / 2:
        own, theirs = relative_l2(ours, referee), relative_l2(reference, referee)
        note = f"max error {error:.1e}; from float64 the reference is {theirs:.1e}, ours {own:.1e}"
        measure = "L2 distance to float64, ours / reference's"
        error, tolerance = own / theirs, REFEREE_RATIO
        return Row(set_name, "float32", kind, label, error, tolerance, measure, note, l2, cosine, ratio)
    return Row(set_name, "float32", kind, label, error, tolerance, l2=l2, cosine=cosine, norm_ratio=ratio)


def bfloat16(set_name: str, kind: Kind, ours: Arrays, reference: Arrays, wide: Arrays, names: list[str]) -> list[Row]:
    """One row a name, and one for the pool: distance to the float32 results, ours over the reference's."""
    zero = [n for n in names if kind == "gradient" and exactly_zero_gradient(n)]
    own = {n: relative_l2(ours[n], wide[n]) for n in names if n not in zero}
    theirs = {n: relative_l2(reference[n], wide[n]) for n in own}
    rounded = [n for n in own if theirs[n] > 1e-6]
    pool_own, pool_theirs = (float(np.sqrt(np.mean([d[n] ** 2 for n in rounded or own]))) for d in (own, theirs))
    measure = "L2 distance to float32, ours / reference's"

    def row(name: str) -> Row:
        if name in zero:
            largest = max(float(np.abs(reference[n]).max()) for n in names)
            error, note = float(np.abs(ours[name]).max()) / largest, "exact gradient is zero"
            return Row(set_name, "bfloat16", kind, name, error, BFLOAT16_ZERO, "max abs / largest gradient", note)
        if name not in rounded:
            error = relative_max(ours[name], wide[name])
            return Row(set_name, "bfloat16", kind, name, error, BEFORE_TIME, note="float32 in both")
        small = ours[name].size < SMALL_ARRAY
        error = own[name] / (max(theirs[name], pool_theirs) if small else theirs[name])
        note, (cosine, ratio) = f"reference's L2 {theirs[name]:.1e}", directions(ours[name], wide[name])
        return Row(set_name, "bfloat16", kind, name, error, BFLOAT16_RATIO, measure, note, own[name], cosine, ratio)

    rows = [row(name) for name in names]
    if rounded:
        note = f"ours {pool_own:.1e}, reference's {pool_theirs:.1e}"
        error, label = pool_own / pool_theirs, f"all {len(rounded)} together"
        rows.append(Row(set_name, "bfloat16", kind, label, error, BFLOAT16_RATIO, measure, note))
    return rows
