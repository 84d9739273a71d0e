"""Single building blocks, called one by one: norms, rotary positions, time embedding, activations, masks, schedules.

Each is small enough that a wrong epsilon or constant shows, which a whole model hides in its rounding.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from compute import run as run_compiled
from compute import stored
from openpi.models import gemma, pi0
from openpi.training import optimizer as openpi_optimizer

Arrays = dict[str, np.ndarray]
DTYPES = ("float32", "bfloat16")
WIDTH, CONDITION = 64, 32


def run(function: Callable[..., Any], dtype: str, *args: Any) -> Any:
    """float32 operation by operation; bfloat16 compiled with strict rounding."""
    return function(*args) if dtype == "float32" else run_compiled(function, dtype, *args)


def unit_vectors(seed: int) -> Arrays:
    """All arrays of units.npz."""
    rng = np.random.default_rng((seed, 3))
    arrays = _norms(rng) | _rotary(rng) | _activations(rng) | _masks(rng)
    # More than one time: for a single one XLA orders the factors of the angle differently.
    time = np.concatenate([[0.001, 1.0, 0.5], rng.uniform(0.001, 1.0, 9)]).astype(np.float32)
    arrays["posemb/time"] = time
    for width in (32, 48, 1024):
        arrays[f"posemb/dim{width}"] = np.asarray(pi0.posemb_sincos(jnp.asarray(time), width, 4e-3, 4.0))
    return arrays


def _normal(rng: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> np.ndarray:
    return (mean + std * rng.standard_normal(shape)).astype(np.float32)


def _norms(rng: np.random.Generator) -> Arrays:
    parameters = {
        "rms_scale": _normal(rng, (WIDTH,), std=0.2),
        "ada_kernel": _normal(rng, (CONDITION, 3 * WIDTH), std=CONDITION**-0.5),
        "ada_bias": _normal(rng, (3 * WIDTH,), std=0.3),
        "cond": _normal(rng, (2, CONDITION)),
        "ln_scale": _normal(rng, (WIDTH,), mean=1.0, std=0.2),
        "ln_bias": _normal(rng, (WIDTH,), std=0.1),
    }
    arrays = {f"norm/{k}": v for k, v in parameters.items()}
    cases = {
        "unit": _normal(rng, (2, 5, WIDTH)),
        "small": _normal(rng, (2, 5, WIDTH), std=1e-3),
        "offset": _normal(rng, (2, 5, WIDTH), mean=3.0, std=0.5),
    }
    for case, values in cases.items():
        # Values of bfloat16 have exact float32 sums: what is compared is the formula, not the order of a sum.
        x = stored(jnp.asarray(values).astype(jnp.bfloat16))
        arrays[f"norm/{case}/x"] = x
        for dtype in DTYPES:
            results = run(_all_norms(dtype), dtype, {k: jnp.asarray(v) for k, v in parameters.items()}, jnp.asarray(x))
            arrays.update({f"norm/{case}/{name}_{dtype}": stored(value) for name, value in results.items()})
    return arrays


def _all_norms(dtype: str) -> Any:
    def apply(p, x):
        x = x.astype(dtype)
        rms, _ = gemma.RMSNorm().apply({"params": {"scale": p["rms_scale"]}}, x, None)
        dense = {"kernel": p["ada_kernel"], "bias": p["ada_bias"]}
        ada, gate = gemma.RMSNorm().apply({"params": {"Dense_0": dense}}, x, p["cond"])
        scale = {"scale": p["ln_scale"], "bias": p["ln_bias"]}
        return {"rms": rms, "ada": ada, "ada_gate": gate, "ln": nn.LayerNorm(dtype=dtype).apply({"params": scale}, x)}

    return apply


def _rotary(rng: np.random.Generator) -> Arrays:
    arrays: Arrays = {}
    positions = np.array([[-1, 0, 1, 2, 100, 767, 968]], dtype=np.int32)
    for width, heads in ((16, 3), (24, 2), (256, 1)):
        x = _normal(rng, (1, positions.shape[1], heads, width))
        arrays.update({f"rope/h{width}/x": x, f"rope/h{width}/positions": positions})
        for dtype in DTYPES:

            def rotate(x, positions, dtype=dtype):
                return gemma._apply_rope(x.astype(dtype), positions=positions)

            arrays[f"rope/h{width}/y_{dtype}"] = stored(run(rotate, dtype, jnp.asarray(x), jnp.asarray(positions)))
    return arrays


def _activations(rng: np.random.Generator) -> Arrays:
    x = np.linspace(-6, 6, 241).astype(np.float32)
    arrays = {"act/x": x}
    for name, function, dtype in (
        ("act/gelu", nn.gelu, "float32"),
        ("act/swish", nn.swish, "float32"),
        ("act/gelu_bfloat16", nn.gelu, "bfloat16"),
    ):
        arrays[name] = stored(run(function, dtype, jnp.asarray(x).astype(dtype)))
    parts = {"x": _normal(rng, (2, 5, WIDTH)), "y": _normal(rng, (2, 5, WIDTH)), "gate": _normal(rng, (2, 1, WIDTH))}
    arrays.update({f"gated/{k}": v for k, v in parts.items()})
    for dtype in DTYPES:
        given = [jnp.asarray(v).astype(dtype) for v in parts.values()]
        arrays[f"gated/out_{dtype}"] = stored(run(gemma._gated_residual, dtype, *given))
    return arrays


def _masks(rng: np.random.Generator) -> Arrays:
    arrays: Arrays = {}
    for case, length in enumerate((6, 6, 10, 8)):
        valid, starts = rng.random((1, length)) < 0.8, rng.random(length) < (0.0, 1.0, 0.4, 0.2)[case]
        arrays.update({f"mask/{case}/input_mask": valid, f"mask/{case}/mask_ar": starts})
        arrays[f"mask/{case}/attn_mask"] = np.asarray(pi0.make_attn_mask(jnp.asarray(valid), jnp.asarray(starts)))
    return arrays


def schedules() -> Arrays:
    """All arrays of schedule.npz."""
    steps = np.concatenate([np.arange(0, 1200, 10), np.linspace(1200, 40_000, 200)]).astype(np.int32)
    tiny = np.arange(70, dtype=np.int32)
    cosine, rsqrt = openpi_optimizer.CosineDecaySchedule, openpi_optimizer.RsqrtDecaySchedule
    curves = {
        "lr": (cosine(), steps),
        "tiny_lr": (cosine(warmup_steps=10, peak_lr=1e-3, decay_steps=60, decay_lr=1e-4), tiny),
        "rsqrt_lr": (rsqrt(), steps),
    }
    rates = {k: np.asarray(jax.vmap(s.create())(jnp.asarray(at)), np.float32) for k, (s, at) in curves.items()}
    return {"steps": steps, "tiny_steps": tiny, **rates}
