"""Sample number → data set row, a pure function: a new permutation of all rows every epoch, stored nowhere.

Sample n belongs to epoch n // size, at position n % size. Within an epoch, position → row is a bijection: a Feistel
network on the smallest power of four that holds all rows, walked until it lands on one (cycle walking), keyed by the
seed and the epoch. So any sample can be found without the ones before it, and a resumed run needs one integer.
"""

import numpy as np
from jaxtyping import Int64

ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TRAIN, _VALIDATION, _SPLIT = (np.uint64(k) for k in (0x7261696E, 0x76616C69, 0x73706C69))  # streams of one seed


def rows_of(
    seed: int, sample_numbers: Int64[np.ndarray, "n"], size: int, *, validation: bool = False
) -> Int64[np.ndarray, "n"]:
    """Rows in [0, size) of the given sample numbers. Validation has an order of its own."""
    if size < 1:
        raise ValueError(
            f"the data set has {size} frames for this split; training needs at least one: check its episodes"
        )
    epochs, positions = np.divmod(sample_numbers, size)
    stream = _VALIDATION if validation else _TRAIN
    return _permute(_keys(seed, stream, epochs.astype(np.uint64)), positions, size)


def split_episodes(
    seed: int, episodes: int, fraction: float
) -> tuple[Int64[np.ndarray, "train"], Int64[np.ndarray, "validation"]]:
    """Episode positions for training and held out for validation, each ascending: round(fraction · episodes) held out.

    A pure function of its arguments. A fraction above 0 holds out at least one episode and leaves at least one.
    """
    positions = np.arange(episodes, dtype=np.int64)
    if fraction == 0.0:
        return positions, positions[:0]
    if episodes < 2:
        raise ValueError(
            f"data.validation_fraction is {fraction} but the data set has {episodes} episode; holding one out needs at "
            "least 2: set --data.validation-fraction 0"
        )
    held_out = min(max(round(fraction * episodes), 1), episodes - 1)
    order = _permute(_keys(seed, _SPLIT, np.zeros(episodes, np.uint64)), positions, episodes)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, stream: np.uint64, epochs: np.ndarray) -> np.ndarray:
    """One 64-bit key per entry of `epochs`."""
    with np.errstate(over="ignore"):
        base = _mix(np.full(1, seed % 2**64, np.uint64) + stream * _GOLDEN)
        return _mix(_mix(base ^ epochs) + _GOLDEN)


def _permute(keys: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """The row of each position, under its own key."""
    half_bits = max(2, ((size - 1).bit_length() + 1) // 2)
    with np.errstate(over="ignore"):
        round_keys = [_mix(keys + np.uint64(i + 1) * _GOLDEN) for i in range(ROUNDS)]
        rows = positions.astype(np.uint64)
        pending = np.arange(len(rows))
        while len(pending):
            rows[pending] = _feistel([k[pending] for k in round_keys], rows[pending], half_bits)
            pending = pending[rows[pending] >= size]
    return rows.astype(np.int64)


def _feistel(round_keys: list[np.ndarray], x: np.ndarray, half_bits: int) -> np.ndarray:
    """A bijection of [0, 4 ** half_bits)."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right
