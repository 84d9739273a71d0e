"""Judgements on recorded numbers and prompts: what loads, trains and is still wrong (`piston data check`)."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float64

from piston.config.schema import RunConfig
from piston.data.dataset import Dataset
from piston.data.episodes import some
from piston.data.layout import INDEX_COLUMNS
from piston.data.problems import Problem

_ROWS = 200_000  # rows from which values are judged
_FEWEST = 100  # rows below which nothing is said of distributions
_CHARACTERS_PER_TOKEN = 3  # of English task texts, on the safe side
_STATE_KEYS = ("observation.state", "state", "observation.states")

Rows = Float64[np.ndarray, "n d"]


def signals(ds: Dataset, run: RunConfig | None) -> Iterator[Problem]:
    """Every finding on columns of numbers, on episodes and on prompts; `run` gives the token budget."""
    yield from _prompts(ds, run)
    if ds.num_frames < _FEWEST:
        return
    for key in ds.features:
        values = None if key in INDEX_COLUMNS or key.startswith("next.") else _values(ds, key)
        if values is not None:
            yield from _spread(key, values)
    action_key = next((key for key in ("action", "actions") if key in ds.columns), None)
    state_key = next((key for key in _STATE_KEYS if key in ds.columns), None)
    action = None if action_key is None else _values(ds, action_key, whole=True)
    state = None if state_key is None else _values(ds, state_key, whole=True)
    if action is not None:
        yield from _duplicates(ds, action, state)
    if state is not None:
        yield from _motion(ds, state)
    if action is not None and state is not None:
        yield from _pair(action, state)


def _values(ds: Dataset, key: str, *, whole: bool = False) -> Rows | None:
    """A finite column of floating numbers as [rows, values]; None for other columns."""
    if key not in ds.columns or ds.features[key]["dtype"] in ("image", "video"):
        return None
    try:
        column = ds.column(key)
    except ValueError:
        return None
    if column.dtype.kind != "f" or column.size == 0:
        return None
    column = column if whole else column[:: max(1, len(column) // _ROWS)]
    values = column.reshape(len(column), -1).astype(np.float64)
    return values if np.isfinite(values).all() else None


def _spread(key: str, values: Rows) -> Iterator[Problem]:
    """Dimensions that hardly move, that stand still nearly always, or that stop at a limit."""
    low, high, mean = values.min(0), values.max(0), np.abs(values.mean(0))
    scale, span = np.maximum(1.0, mean), high - low
    moves = span > 1e-6 * scale
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    nearly = moves & (span < 1e-3 * scale)
    narrow = moves & ~nearly & (q99 - q01 <= 1e-3 * span)
    ends = np.maximum((np.isclose(values, low)).mean(0), (np.isclose(values, high)).mean(0))
    many = np.array([len(np.unique(np.round(column, 6))) > 10 for column in values.T])
    held = moves & ~nearly & ~narrow & many & (ends > 0.25)
    fix = "normalisation magnifies its noise: leave it out of the state, or widen q01 and q99 in norm_stats.json"
    for kind, mask, what, expected, severity in (
        ("nearly-constant", nearly, "hardly moves", "a range above 0.1 %", "warning"),
        (
            "narrow-quantiles",
            narrow,
            "stands still except in a few frames (q01 ≈ q99)",
            "q01 well below q99",
            "warning",
        ),
        ("saturated", held, "stands at its limit in over a quarter of the frames", "values inside limits", "note"),
    ):
        if mask.any():
            worst = int(np.flatnonzero(mask)[0])
            value = f"dimensions {some(np.flatnonzero(mask))} of {len(mask)}; dimension {worst}: {low[worst]:.4g} … "
            value += f"{high[worst]:.4g}, q01 {q01[worst]:.4g}, q99 {q99[worst]:.4g}"
            todo = "check whether a limit or a clipped sensor is meant" if kind == "saturated" else fix
            yield Problem("note" if severity == "note" else "warning", kind, f"`{key}` {what}", value, expected, todo)
    large = moves & (np.maximum(np.abs(low), np.abs(high)) > 4 * np.pi) & (span > 20)
    if large.any() and ("state" in key or "action" in key):
        value = f"dimensions {some(np.flatnonzero(large))} reach {max(abs(low.min()), abs(high.max())):.4g}"
        todo = "if a policy or robot expects radians, convert; statistics of one unit do not serve the other"
        yield Problem("note", "degrees", f"`{key}` looks like degrees or encoder ticks", value, "radians", todo)


def _motion(ds: Dataset, state: Rows) -> Iterator[Problem]:
    """Idle time, and angles that jump by a full turn."""
    inside = np.ones(len(state) - 1, bool)
    inside[ds.episode_starts[1:-1] - 1] = False
    change = np.diff(state, axis=0)[inside]
    if not len(change):
        return
    idle = float((np.abs(change) <= 1e-3 * np.maximum(np.ptp(state, axis=0), 1e-9)).all(1).mean())
    if idle > 0.3:
        todo = "the policy learns to wait: record without pauses, or cut them out"
        yield Problem("warning", "idle", "the state does not move in many frames", f"{idle:.0%}", "below 30 %", todo)
    turns = (np.abs(np.abs(change) - 2 * np.pi) < 0.1) | (np.abs(np.abs(change) - 360) < 5)
    if turns.any():
        value = f"dimensions {some(np.flatnonzero(turns.any(0)))}, {int(turns.sum())} times"
        todo = "unwrap the angle along each episode, or record sine and cosine"
        yield Problem("warning", "angle-wrap", "an angle jumps by a full turn", value, "no jumps", todo)


def _duplicates(ds: Dataset, action: Rows, state: Rows | None) -> Iterator[Problem]:
    """Episodes with the same numbers: they count twice, and leak from training into validation."""
    seen: dict[bytes, int] = {}
    twins = []
    for e, number in enumerate(ds.episode_index.tolist()):
        rows = slice(ds.episode_starts[e], ds.episode_starts[e + 1])
        content = action[rows].tobytes() + (b"" if state is None else state[rows].tobytes())
        first = seen.setdefault(content, number)
        if first != number and rows.stop - rows.start > 1:
            twins.append(f"{number} = {first}")
    if twins:
        todo = "remove the copies: they count twice, and a held-out copy makes validation look better than it is"
        value = some(np.array(twins, object))
        yield Problem("warning", "duplicate-episodes", "episodes repeat others", value, "each recorded once", todo)


def _pair(action: Rows, state: Rows) -> Iterator[Problem]:
    """Action against state: the same numbers, other units, opposite signs."""
    width = min(action.shape[1], state.shape[1])
    a, s = action[:, :width], state[:, :width]
    moving = (a.std(0) > 1e-6) & (s.std(0) > 1e-6)
    same = moving & (np.abs(a - s).max(0) <= 1e-7 * np.maximum(1.0, np.abs(s).max(0)))
    if same.any():
        todo = "record the command, or take the next state as the action: this one tells the policy to stay"
        value = f"dimensions {some(np.flatnonzero(same))}"
        yield Problem("warning", "action-is-state", "action equals the state of its frame", value, "a command", todo)
    ca, cs = a - a.mean(0), s - s.mean(0)
    like = (ca * cs).mean(0) / (a.std(0) * s.std(0) + 1e-12)
    ratio = a.std(0) / (s.std(0) + 1e-12)
    factor = np.minimum(np.abs(ratio * np.pi / 180 - 1), np.abs(ratio * 180 / np.pi - 1))
    units = moving & (like > 0.8) & (factor < 0.1)
    if units.any():
        value = f"dimensions {some(np.flatnonzero(units))} differ by a factor of about 57.3"
        todo = "convert one of them: deltas between degrees and radians mean nothing"
        yield Problem("warning", "unit-mismatch", "action and state have other units", value, "one unit", todo)
    opposite = moving & (like < -0.9) & (np.abs(ratio - 1) < 0.2)
    if opposite.any():
        value = f"dimensions {some(np.flatnonzero(opposite))}"
        todo = "a gripper or joint counts the other way in one of them: make the signs agree before deltas are taken"
        yield Problem("warning", "opposite-sign", "action runs against the state", value, "the same sign", todo)


def _prompts(ds: Dataset, run: RunConfig | None) -> Iterator[Problem]:
    """Task texts that are too long for the token budget, or written in several ways."""
    budget = 48 if run is None else run.model.max_token_len
    for index, text in ds.tasks.items():
        tokens = -(-len(text) // _CHARACTERS_PER_TOKEN)
        if tokens > budget:
            value = f"task {index}: {len(text)} characters, about {tokens} tokens"
            todo = f"shorten it, or set --model.max-token-len {-(-tokens // 16) * 16}: the rest is cut off"
            yield Problem("warning", "long-task", "task text is long", value, f"about {budget} tokens", todo)
    spelled: dict[str, int] = {}
    for index, text in ds.tasks.items():
        first = spelled.setdefault(" ".join(text.lower().split()).rstrip("."), index)
        if first != index and text.strip():
            todo = "write one text for one task: the policy sees two prompts"
            yield Problem("warning", "task-twins", "tasks differ in spelling only", f"{first} and {index}", "one", todo)
