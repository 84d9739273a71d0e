"""The order of samples: a bijection per epoch, different each epoch, and a pure function of seed and number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.data.order import rows_of, split_episodes

seeds = st.integers(0, 2**63 - 1)
PINNED = [629, 548, 503, 268, 416, 623, 153, 0]
PINNED_LARGE = [7454213234, 2620717924, 621392508, 6984935847]


def epoch(seed: int, number: int, size: int, *, validation: bool = False) -> np.ndarray:
    return rows_of(seed, np.arange(number * size, (number + 1) * size), size, validation=validation)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, number=st.integers(0, 1000), size=st.integers(1, 700))
def test_each_epoch_visits_every_row_once(seed: int, number: int, size: int) -> None:
    assert np.array_equal(np.sort(epoch(seed, number, size)), np.arange(size))


@settings(deadline=None, max_examples=60)
@given(seed=seeds, size=st.integers(1, 10**12), numbers=st.lists(st.integers(0, 10**15), min_size=1, max_size=30))
def test_any_number_alone_gives_the_row_it_gives_in_company(seed: int, size: int, numbers: list[int]) -> None:
    together = rows_of(seed, np.array(numbers), size)
    alone = [rows_of(seed, np.array([n]), size)[0] for n in numbers]
    assert together.tolist() == alone
    assert together.min() >= 0
    assert together.max() < size


@pytest.mark.parametrize("size", [64, 100, 1000, 4097])
def test_epochs_and_seeds_share_no_order(size: int) -> None:
    orders = [
        epoch(7, 0, size),
        epoch(7, 1, size),
        epoch(8, 0, size),
        epoch(7, 0, size, validation=True),
        np.arange(size),
    ]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert np.mean(a == b) < 0.1  # 1/size is expected


@pytest.mark.parametrize("size", [3, 5, 16, 37])
def test_rows_are_uniform_over_epochs(size: int) -> None:
    epochs = 4000
    rows = rows_of(3, np.arange(epochs * size), size).reshape(epochs, size)
    counts = np.stack([np.bincount(rows[:, p], minlength=size) for p in range(size)])  # position × row
    expected = epochs / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)


def test_neighbouring_positions_are_uncorrelated() -> None:
    rows = epoch(11, 0, 20_000).astype(float)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(rows, np.arange(20_000))[0, 1]) < 0.03


def test_the_order_is_pinned() -> None:
    # A change here breaks the resumption of every run made before it.
    assert rows_of(42, np.arange(8), 1000).tolist() == PINNED
    assert rows_of(42, np.arange(4), 10**10).tolist() == PINNED_LARGE


def test_an_empty_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 frames"):
        rows_of(0, np.arange(3), 0)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, episodes=st.integers(2, 300), fraction=st.floats(0.001, 0.99))
def test_split_is_a_partition(seed: int, episodes: int, fraction: float) -> None:
    train, held_out = split_episodes(seed, episodes, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(episodes))
    assert len(held_out) == min(max(round(fraction * episodes), 1), episodes - 1)
    assert np.array_equal(train, np.sort(train))


def test_split_depends_on_the_seed_and_holds_out_nothing_by_default() -> None:
    train, held_out = split_episodes(1, 50, 0.0)
    assert len(train) == 50
    assert len(held_out) == 0
    assert not np.array_equal(split_episodes(1, 50, 0.2)[1], split_episodes(2, 50, 0.2)[1])
    with pytest.raises(ValueError, match="1 episode"):
        split_episodes(1, 1, 0.5)
