"""What a bundle records of a model set: every intermediate, loss, gradients, sampling; and training curves.

Losses, gradients and sampled actions come from openpi's own methods, with its random draws replaced by recorded ones.
The intermediates come from the same methods called one by one; the two must agree or the recording fails.
"""

import logging
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from openpi.models import pi0
from openpi.training import optimizer as openpi_optimizer
from reference import Model

log = logging.getLogger("record")
Arrays = dict[str, np.ndarray]

# float32 at optimisation level 0 (seconds to compile); bfloat16 rounding after every operation, as written.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OPTIONS = {"float32": FAST, "bfloat16": {**FAST, "xla_allow_excess_precision": False}}
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2}  # openpi's method against its steps called one by one


def compiled(function: Callable[..., Any], dtype: str, *args: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*args).compile(compiler_options=OPTIONS[dtype])


def run(function: Callable[..., Any], dtype: str, *args: Any) -> Any:
    return compiled(function, dtype, *args)(*args)


def replaced_draws(noise: jax.Array, beta: jax.Array) -> Any:
    """While it is being traced, openpi's model code draws these arrays from jax.random.normal and jax.random.beta."""
    draws = {**vars(jax.random), "normal": lambda *args: noise, "beta": lambda *args: beta}
    module = types.SimpleNamespace(**{**vars(jax), "random": types.SimpleNamespace(**draws)})
    return mock.patch.object(pi0, "jax", module)


def mean_loss(model: pi0.Pi0, observation: Any, actions: jax.Array, noise: jax.Array, beta: jax.Array) -> jax.Array:
    with replaced_draws(noise, beta):
        return jnp.mean(model.compute_loss(jax.random.key(0), observation, actions, train=False))


def taps(model: pi0.Pi0, observation: Any, actions: jax.Array, noise: jax.Array, time: jax.Array) -> dict[str, Any]:
    """Every intermediate of one loss, by its name in the golden format."""
    tap: dict[str, Any] = {}
    first, *_ = observation.images
    for camera, images in observation.images.items():
        tokens, tower = model.PaliGemma.img(images, train=False)
        tap[f"image_tokens/{camera}"] = tokens
        if camera == first:
            rows = (tokens.shape[0], tokens.shape[1], -1)
            tap["siglip/stem"] = tower["stem"].reshape(rows)
            tap["siglip/with_posemb"], tap["siglip/encoded"] = tower["with_posemb"], tower["encoded"]
            blocks = {name: block for name, block in tower["encoder"].items() if name.startswith("block")}
            tap.update({f"siglip/{name}_out": block["+mlp"] for name, block in blocks.items()})

    t = time[:, None, None]
    tap["x_t"], tap["u_t"] = t * noise + (1 - t) * actions, noise - actions
    width = model.action_in_proj.out_features
    tap["time_posemb"] = pi0.posemb_sincos(time, width, min_period=4e-3, max_period=4.0)
    prefix, prefix_mask, prefix_starts = model.embed_prefix(observation)
    suffix, suffix_mask, suffix_starts, condition = model.embed_suffix(observation, tap["x_t"], time)
    tap.update({"prefix_tokens": prefix, "prefix_mask": prefix_mask, "prefix_ar_mask": prefix_starts})
    tap.update({"suffix_tokens": suffix, "suffix_mask": suffix_mask, "suffix_ar_mask": suffix_starts})
    if condition is not None:
        tap["adarms_cond"] = condition
    valid = jnp.concatenate([prefix_mask, suffix_mask], axis=1)
    tap["attn_mask"] = pi0.make_attn_mask(valid, jnp.concatenate([prefix_starts, suffix_starts]))
    tap["positions"] = jnp.cumsum(valid, axis=1) - 1
    (tap["prefix_out"], tap["suffix_out"]), (tap["kv_k"], tap["kv_v"]) = model.PaliGemma.llm(
        [prefix, suffix], mask=tap["attn_mask"], positions=tap["positions"], adarms_cond=[None, condition]
    )
    tap["v_t"] = model.action_out_proj(tap["suffix_out"][:, -model.action_horizon :])
    tap["loss_per_element"] = jnp.square(tap["v_t"] - tap["u_t"])
    tap["loss_chunk"] = jnp.mean(tap["loss_per_element"], axis=-1)
    tap["loss"] = jnp.mean(tap["loss_chunk"])
    return tap


def stored(array: Any) -> np.ndarray:
    """As a bundle keeps it: bfloat16 widened to float32."""
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


def agree(what: str, dtype: str, a: np.ndarray, b: np.ndarray) -> None:
    error = float(np.abs(a.astype(np.float64) - b).max() / max(float(np.abs(b).max()), 1e-30))
    log.info("%s %s: openpi's own method and its steps called one by one differ by %.1e", dtype, what, error)
    if not error <= AGREEMENT[dtype]:
        raise RuntimeError(f"{what}: openpi's own method and its steps called one by one differ by {error:.1e}")


def model_results(arch: dict[str, Any], params: Arrays, inputs: Arrays, dtype: str, steps: list[int]) -> Arrays:
    """All arrays of `<set>_<dtype>.npz`; sampling with 10 steps, and with each of `steps`."""
    model = Model(arch, dtype)
    args = ({k: jnp.asarray(v) for k, v in params.items()}, {k: jnp.asarray(v) for k, v in inputs.items()})

    def all_taps(weights, given):
        observation = reference.observation(arch, given)
        return taps(model.build(weights), observation, given["actions"], given["noise"], given["time"])

    def loss(weights, given):
        observation = reference.observation(arch, given)
        return mean_loss(model.build(weights), observation, given["actions"], given["noise"], given["beta"])

    results = {k: stored(v) for k, v in run(all_taps, dtype, *args).items()}
    value, gradients = run(jax.value_and_grad(loss), dtype, *args)
    agree("loss", dtype, results["loss"], np.asarray(value))
    results["grad_global_norm"] = np.asarray(optax.global_norm(gradients))
    results.update({f"grads/{k}": stored(v) for k, v in gradients.items()})
    results |= sampling(arch, model, *args, dtype, steps)
    if dtype == "bfloat16":
        results |= rounded_parameters(arch, model, *args)
    return results


def sampling(
    arch: dict[str, Any], model: Model, weights: Any, inputs: Any, dtype: str, other_steps: list[int]
) -> Arrays:
    """`sample/*`: openpi's sample_actions, and its loop taken apart."""
    results: Arrays = {}
    for count in (10, *other_steps):

        def sample(weights, given, count=count):
            observation, noise = reference.observation(arch, given), given["sample_noise"]
            return model.build(weights).sample_actions(jax.random.key(0), observation, num_steps=count, noise=noise)

        name = "sample/actions" if count == 10 else f"sample/actions_num_steps{count}"
        results[name] = stored(run(sample, dtype, weights, inputs))

    def taken_apart(weights, given):
        # The same lax.while_loop as openpi's: unrolled, XLA would round the time embedding differently.
        built, observation = model.build(weights), reference.observation(arch, given)
        tokens, valid, starts = built.embed_prefix(observation)
        positions = jnp.cumsum(valid, axis=1) - 1
        prefix_mask = pi0.make_attn_mask(valid, starts)
        _, cache = built.PaliGemma.llm([tokens, None], mask=prefix_mask, positions=positions)
        batch, dt = given["sample_noise"].shape[0], -1.0 / 10

        def step(carry):
            x_t, time, i, history, _ = carry
            suffix, suffix_valid, starts, condition = built.embed_suffix(
                observation, x_t, jnp.broadcast_to(time, batch)
            )
            to_prefix = jnp.broadcast_to(valid[:, None], (batch, suffix.shape[1], valid.shape[1]))
            mask = jnp.concatenate([to_prefix, pi0.make_attn_mask(suffix_valid, starts)], axis=-1)
            positions = jnp.sum(valid, axis=-1)[:, None] + jnp.cumsum(suffix_valid, axis=-1) - 1
            (_, out), _ = built.PaliGemma.llm(
                [None, suffix], mask=mask, positions=positions, kv_cache=cache, adarms_cond=[None, condition]
            )
            velocity = built.action_out_proj(out[:, -built.action_horizon :])
            x_next = x_t + dt * velocity
            new = {"times": time, "x_steps": x_next, "v_steps": velocity}
            history = {name: array.at[i].set(new[name]) for name, array in history.items()}
            return x_next, time + dt, i + 1, history, (positions, mask)

        suffix_len = arch["action_horizon"] + (0 if arch["pi05"] else 1)
        empty = jnp.zeros((10, *given["sample_noise"].shape))
        history = {"times": jnp.zeros(10), "x_steps": empty, "v_steps": empty}
        shapes = (
            jnp.zeros((batch, suffix_len), jnp.int32),
            jnp.zeros((batch, suffix_len, valid.shape[1] + suffix_len), bool),
        )
        start = (given["sample_noise"], 1.0, 0, history, shapes)
        *_, history, (suffix_positions, mask) = jax.lax.while_loop(lambda carry: carry[1] >= -dt / 2, step, start)
        return {
            **history,
            "prefix_k": cache[0],
            "prefix_v": cache[1],
            "prefix_positions": positions,
            "suffix_positions": suffix_positions,
            "suffix_attn_mask": mask,
        }

    apart = {f"sample/{k}": stored(v) for k, v in run(taken_apart, dtype, weights, inputs).items()}
    agree("sampling", dtype, apart["sample/x_steps"][-1], results["sample/actions"])
    return results | apart


def rounded_parameters(arch: dict[str, Any], model: Model, weights: Any, inputs: Any) -> Arrays:
    """`bf16params/*`: parameters rounded to bfloat16 too, as openpi's policy loads them."""
    low = {k: v.astype(jnp.bfloat16) for k, v in weights.items()}

    def some_taps(low, given):
        observation = reference.observation(arch, given)
        tap = taps(model.build(low), observation, given["actions"], given["noise"], given["time"])
        return {k: tap[k] for k in ("prefix_tokens", "suffix_tokens", "v_t", "loss")}

    def sample(low, given):
        observation = reference.observation(arch, given)
        return model.build(low).sample_actions(jax.random.key(0), observation, noise=given["sample_noise"])

    recorded = {f"bf16params/{k}": stored(v) for k, v in run(some_taps, "bfloat16", low, inputs).items()}
    recorded["bf16params/sample_actions"] = stored(run(sample, "bfloat16", low, inputs))
    return recorded


def schedule_of(settings: dict[str, Any]) -> Any:
    kind = openpi_optimizer.RsqrtDecaySchedule if "timescale" in settings else openpi_optimizer.CosineDecaySchedule
    return kind(**settings)


def _kernel(path: str, array: Any) -> bool:
    """Whether openpi's logged parameter norm counts this array."""
    return array.ndim > 1 and path.rpartition("/")[2] not in ("bias", "scale", "pos_embedding", "input_embedding")


def training_curve(
    arch: dict[str, Any], params: Arrays, recorded: Arrays, entry: dict[str, Any], dtype: str, clip: float | None = None
) -> tuple[Arrays, dict[str, Arrays]]:
    """Scalars of every step, and parameters by checkpoint name, of openpi's optimizer on the recorded batches."""
    model = Model(arch, dtype)
    defaults = {**entry["optimizer_defaults"], **entry["opt"]}
    settings = openpi_optimizer.AdamW(**(defaults if clip is None else {**defaults, "clip_gradient_norm": clip}))
    schedule = schedule_of(entry["sched"])
    rate = schedule.create()
    optimizer = openpi_optimizer.create_optimizer(settings, schedule)
    decay = entry["ema"]

    def update(weights, moments, average, inputs, noise, beta, step):
        def loss_of(weights):
            observation = reference.observation(arch, inputs)
            return mean_loss(model.build(weights), observation, inputs["actions"], noise, beta)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        weights = optax.apply_updates(weights, updates)
        if decay is not None:
            average = {k: decay * average[k] + (1 - decay) * v for k, v in weights.items()}
        kernels = {k: v for k, v in weights.items() if _kernel(k, v)}
        scalars = {
            "loss": loss,
            "grad_norm": optax.global_norm(gradients),
            "param_norm": optax.global_norm(kernels),
            "update_norm": optax.global_norm(updates),
            "lr": jnp.asarray(rate(step), jnp.float32),
        }
        return weights, moments, average, scalars

    weights = {k: jnp.asarray(v) for k, v in params.items()}
    average = dict(weights) if decay is not None else {}
    moments = optimizer.init(weights)
    batches = [
        {k.removeprefix("batches/"): v[i] for k, v in recorded.items() if k.startswith("batches/")}
        for i in range(entry["nbatch"])
    ]
    for batch in batches:
        for camera in arch["image_keys"]:
            images = batch.pop(f"images_u8/{camera}").astype(np.float32) / np.float32(255.0)
            batch[f"images/{camera}"] = images * np.float32(2.0) - np.float32(1.0)
    history: dict[str, list[float]] = {}
    saved: dict[str, Arrays] = {}
    compiled_update = None
    for step in range(entry["steps"]):
        noise, beta = recorded["noise"][step], recorded["beta"][step]
        args = (weights, moments, average, batches[step % len(batches)], noise, beta, jnp.int32(step))
        compiled_update = compiled_update or compiled(update, dtype, *args)
        weights, moments, average, scalars = compiled_update(*args)
        for name, value in scalars.items():
            history.setdefault(name, []).append(float(value))
        if step + 1 in entry.get("save_params_after", ()):
            saved[f"params_after_{step + 1}"] = {k: np.asarray(v) for k, v in weights.items()}
    saved["final_params"] = {k: np.asarray(v) for k, v in weights.items()}
    if decay is not None:
        saved["final_ema"] = {k: np.asarray(v) for k, v in average.items()}
    return {k: np.array(v, dtype=np.float32) for k, v in history.items()}, saved
