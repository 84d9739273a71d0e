"""Normalisation and its inverse, and the statistics it needs: openpi's norm_stats.json, read, checked and written.

π0 uses z-scores, π0.5 quantiles. Formulas: openpi transforms.py Normalize and Unnormalize; file: shared/normalize.py.
"""

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from piston.config.schema import RunConfig

EPSILON = 1e-6
FIELDS = ("mean", "std", "q01", "q99")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeyStats:
    """Statistics of one key, float64, one number per dimension. Quantiles may be missing where z-scores are used."""

    mean: Float[np.ndarray, "d"]
    std: Float[np.ndarray, "d"]
    q01: Float[np.ndarray, "d"] | None = None
    q99: Float[np.ndarray, "d"] | None = None

    def quantiles(self) -> tuple[Float[np.ndarray, "d"], Float[np.ndarray, "d"]]:
        """q01 and q99. Raises ValueError if they are missing."""
        if self.q01 is None or self.q99 is None:
            raise ValueError(
                "the norm statistics have no q01 and q99; quantile normalisation (data.use_quantile_norm, π0.5) needs "
                "them: compute them with `piston data stats`"
            )
        return self.q01, self.q99


NormStats = dict[str, KeyStats]


def normalize(
    x: Float[np.ndarray, "*batch d"], stats: KeyStats, *, use_quantiles: bool
) -> Float[np.ndarray, "*batch d"]:
    """float64. z-score (x − mean)/(std + 1e-6), or quantiles (x − q01)/(q99 − q01 + 1e-6)·2 − 1; nothing is clipped.

    Statistics may be wider than x and are cut to it.
    """
    width = x.shape[-1]
    if use_quantiles:
        q01, q99 = stats.quantiles()
        return (x - q01[:width]) / (q99[:width] - q01[:width] + EPSILON) * 2.0 - 1.0
    return (x - stats.mean[:width]) / (stats.std[:width] + EPSILON)


def unnormalize(
    x: Float[np.ndarray, "*batch d"], stats: KeyStats, *, use_quantiles: bool
) -> Float[np.ndarray, "*batch d"]:
    """The inverse of `normalize`, float64. Dimensions past the statistics are kept: as they are with quantiles, and
    with z-scores as of mean 0 and deviation 1 (so times 1 + 1e-6, as in the reference)."""
    width = x.shape[-1]
    if use_quantiles:
        q01, q99 = (q[:width] for q in stats.quantiles())
        known, rest = x[..., : len(q01)], x[..., len(q01) :]
        return np.concatenate(((known + 1.0) / 2.0 * (q99 - q01 + EPSILON) + q01, rest), axis=-1)
    missing = max(0, width - len(stats.mean))
    mean = np.pad(stats.mean[:width], (0, missing))
    std = np.pad(stats.std[:width], (0, missing), constant_values=1.0)
    return x * (std + EPSILON) + mean


def norm_stats_path(run: RunConfig) -> Path:
    """Where a run's statistics are: `data.norm_stats`, else assets/<recipe>/<repo_id>/norm_stats.json."""
    return run.data.norm_stats or Path("assets") / run.name / run.data.repo_id / "norm_stats.json"


def save_norm_stats(path: Path, stats: NormStats) -> None:
    """Writes openpi's norm_stats.json; the file appears complete or not at all, else ValueError."""
    values = {
        key: {name: None if (v := getattr(value, name)) is None else v.tolist() for name in FIELDS}
        for key, value in stats.items()
    }
    text = json.dumps({"norm_stats": values}, indent=2, allow_nan=False)
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ValueError(
            f"norm statistics cannot be written to {path} ({error.strerror}); expected a file in a folder that can be "
            "written: make room, or choose another place with --out"
        ) from error


def load_norm_stats(path: Path, *, command: str = "piston data stats DATA_SET --recipe RECIPE") -> NormStats:
    """Reads norm_stats.json, or the one in a directory (openpi's assets are directories). float64.

    Raises ValueError, naming the file and the command that makes one, if it is missing or makes no sense.
    """
    file = path / "norm_stats.json" if path.is_dir() else path
    remedy = f"make it with `{command}`, or pass another with --data.norm-stats PATH"
    if not file.is_file():
        raise ValueError(f"norm statistics {file} do not exist; expected openpi's norm_stats.json; {remedy}")
    try:
        content = json.loads(file.read_text())["norm_stats"]
        arrays = {key: _arrays(value) for key, value in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"norm statistics {file} cannot be read ({error!r}); expected openpi's layout, "
            f'{{"norm_stats": {{"state": {{"mean": [numbers], "std", "q01", "q99"}}, "actions": …}}}}; {remedy}'
        ) from error
    for key, value in arrays.items():
        _check_numbers(value, f"`{key}` in {file}", remedy)
    return {key: KeyStats(**value) for key, value in arrays.items()}


def load_for_run(run: RunConfig) -> NormStats:
    """The run's statistics, checked against its robot. Raises as `load_norm_stats` and `check_norm_stats` do."""
    root = run.data.root or "DATA_SET"
    stats = load_norm_stats(norm_stats_path(run), command=f"piston data stats {root} --recipe {run.name}")
    check_norm_stats(stats, run)
    return stats


def _arrays(values: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: np.array(values[name], np.float64) for name in FIELDS if values.get(name) is not None}
    missing = [name for name in ("mean", "std") if name not in arrays]
    wrong = {name: array.shape for name, array in arrays.items() if array.ndim != 1 or len(array) == 0}
    if missing or wrong:
        raise ValueError(f"no {', '.join(missing)}" if missing else f"not lists of numbers, but shapes {wrong}")
    return arrays


def _check_numbers(arrays: dict[str, np.ndarray], where: str, remedy: str) -> None:
    widths = {name: len(array) for name, array in arrays.items()}
    if len(set(widths.values())) > 1:
        raise ValueError(f"norm statistics of {where} have different lengths {widths}; expected one; {remedy}")
    faults = {name: ~np.isfinite(array) for name, array in arrays.items()}
    faults["std"] |= arrays["std"] < 0
    if "q01" in arrays and "q99" in arrays:
        faults["q99"] |= arrays["q99"] < arrays["q01"]
    for name, fault in faults.items():
        if fault.any():
            raise ValueError(
                f"norm statistics of {where} have {name} {arrays[name][fault].tolist()} in dimensions "
                f"{np.flatnonzero(fault).tolist()}; expected finite numbers, std ≥ 0 and q99 ≥ q01; {remedy}"
            )


def check_norm_stats(stats: NormStats, run: RunConfig) -> None:
    """Raises ValueError if the statistics do not fit the run's robot or lack quantiles it needs.

    Wider ones are cut, as openpi does: its base models' assets are as wide as the model. Any other width is logged.
    """
    robot = run.data.robot
    for key, width in (("state", robot.state_dim), ("actions", robot.action_dim)):
        if key not in stats:
            raise ValueError(
                f"norm statistics have no `{key}`, only {sorted(stats)}; expected state and actions (data.norm_stats): "
                "make them with `piston data stats`"
            )
        found = len(stats[key].mean)
        if found < width:
            raise ValueError(
                f"norm statistics of `{key}` have {found} dimensions, robot {robot.name} has {width}; expected at "
                "least as many (data.norm_stats): make them with `piston data stats` for this recipe"
            )
        if found not in (width, run.model.action_dim):
            log.warning(
                "norm statistics of `%s` have %d dimensions, robot %s has %d: the first are used; are they its own?",
                key,
                found,
                robot.name,
                width,
            )
        if run.data.use_quantile_norm:
            stats[key].quantiles()
