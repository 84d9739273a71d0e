"""openpi's JAX code, live: records bundles of fresh architectures, then compares Piston with them.

JAX lives in a venv of its own (`make live`). Piston writes a request to a file, starts the recorder there as a process
and reads the bundle that it writes; no JAX is ever imported here. The recorder draws every weight, also those that
openpi initialises with zero, observations with a masked camera between two valid ones, prompts of different length and
states below −1.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape

from piston.config.recipes import recipe
from piston.config.schema import GEMMA_VARIANTS, SO400M, GemmaConfig, LoraConfig, ModelConfig, SiglipConfig
from piston.config.serialize import from_json
from piston.verify.bundle import open_bundle
from piston.verify.curve import verify_curve
from piston.verify.forward import verify_forward
from piston.verify.gradient import verify_gradient
from piston.verify.report import Report, render

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv-live"
RECORDER = ROOT / "scripts" / "openpi_live" / "record.py"
LOG = "record.log"

Sets = dict[str, dict[str, Any]]

TOWER = SiglipConfig(width=48, depth=2, mlp_dim=64, num_heads=2)
DUMMY = GEMMA_VARIANTS["dummy"]


def _gemma(width: int, mlp_dim: int, *, lora: LoraConfig | None = None, ffn: LoraConfig | None = None) -> GemmaConfig:
    """Two key heads, and widths whose roots are no powers of two, so that constants need rounding."""
    sizes = {"depth": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
    return GemmaConfig(width=width, mlp_dim=mlp_dim, lora_attn=lora, lora_ffn=ffn, **sizes)


TINY = ModelConfig(
    pi05=True,
    paligemma=_gemma(80, 96),
    action_expert=_gemma(48, 80),
    siglip=TOWER,
    vocab_size=256,
    image_size=(28, 42),
    action_dim=6,
    action_horizon=5,
    max_token_len=16,
)
LORA = replace(
    TINY,
    paligemma=_gemma(80, 96, lora=LoraConfig(4, 6.0), ffn=LoraConfig(3, 6.0)),
    action_expert=_gemma(48, 80, lora=LoraConfig(3, 2.0, rslora=True)),
)
ARCHITECTURES: dict[str, ModelConfig] = {
    "live_pi05": TINY,
    "live_pi0": replace(TINY, pi05=False, cameras=("top", "left_wrist", "side", "front"), image_size=(42, 28)),
    "live_pi05_lora": LORA,
    "live_pi0_dummy": replace(TINY, pi05=False, paligemma=DUMMY, action_expert=DUMMY, action_dim=32),
}
CURVE_BASE = "live_pi05"
# π0.5 at its real widths, two layers deep, so that long sums and their rounding are the real ones. Takes minutes and
# GBs: only with --only live_full_width.
FULL_WIDTH = replace(
    TINY,
    paligemma=replace(GEMMA_VARIANTS["gemma_2b"], depth=2),
    action_expert=replace(GEMMA_VARIANTS["gemma_300m"], depth=2),
    siglip=replace(SO400M, depth=2),
    image_size=(28, 28),
    action_dim=32,
)
ON_REQUEST: dict[str, ModelConfig] = {"live_full_width": FULL_WIDTH}


def arch_of(config: ModelConfig) -> dict[str, Any]:
    """A manifest's `arch` entry; `bundle.model_config` is its inverse."""

    def gemma(part: GemmaConfig) -> dict[str, Any]:
        return {k: v for k, v in asdict(part).items() if not k.startswith("lora")}

    def lora(part: GemmaConfig) -> dict[str, Any] | None:
        adapters = {"attn": part.lora_attn, "ffn": part.lora_ffn}
        return {k: asdict(v) for k, v in adapters.items() if v is not None} or None

    return {
        "pi05": config.pi05,
        "image_resolution": list(config.image_size),
        "image_keys": list(config.cameras),
        "vlm": gemma(config.paligemma),
        "expert": gemma(config.action_expert),
        "lora_vlm": lora(config.paligemma),
        "lora_expert": lora(config.action_expert),
        "vocab": config.vocab_size,
        "action_dim": config.action_dim,
        "action_horizon": config.action_horizon,
        "max_token_len": config.max_token_len,
        "siglip": {**asdict(config.siglip), "patch_size": list(config.siglip.patch_size)},
    }


def model_set(config: ModelConfig, *, seed: int, batch: int = 6) -> dict[str, Any]:
    """A request's entry: ragged prompts, and cameras masked in turn, the middle one in the first sample."""
    longest = config.max_token_len
    middle = len(config.cameras) // 2
    return {
        "arch": arch_of(config),
        "seed": seed,
        "batch": batch,
        "prompt_lens": [max(1, longest * (batch - i) // batch) for i in range(batch)],
        "image_masks": {
            camera: [(c - middle) % max(len(config.cameras), 2) != i for i in range(batch)]
            for c, camera in enumerate(config.cameras)
        },
    }


def curve_set(base: str, *, seed: int, steps: int = 10) -> dict[str, Any]:
    """A request's entry for a training run: warm-up, an active clip, EMA, and a variant with a clip now and then.

    float32: Adam turns the rounding noise of small bfloat16 gradients into whole steps, and ten of them are luck.
    """
    return {
        "base": base,
        "seed": seed,
        "steps": steps,
        "nbatch": 4,
        "ema": 0.99,
        "sched": {"warmup_steps": 3, "peak_lr": 1e-3, "decay_steps": steps, "decay_lr": 1e-4},
        "opt": {},
        "optimizer_defaults": {
            "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 1e-10, "clip_gradient_norm": 1.0,
        },
        "save_params_after": [1],
        "variants": ["curve_midclip"],
    }  # fmt: skip


def request(names: tuple[str, ...] = tuple(ARCHITECTURES), *, seed: int = 0, curve: bool = True) -> dict[str, Any]:
    """What the recorder is asked for: the named architectures, a curve, single blocks and sample transforms."""
    known = ARCHITECTURES | ON_REQUEST
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no live architecture is called {unknown}; there are {list(known)}; correct --only")
    sets: Sets = {name: model_set(known[name], seed=seed + i) for i, name in enumerate(names)}
    for name in ON_REQUEST.keys() & sets:
        sets[name] = model_set(known[name], seed=sets[name]["seed"], batch=2)
    if "live_pi05_lora" in sets:  # too ill-conditioned in bfloat16 to be a test, as the golden LoRA set is
        sets["live_pi05_lora"]["dtypes"] = ["float32"]
    if curve and CURVE_BASE in sets:
        sets[f"{CURVE_BASE}_train_curve"] = curve_set(CURVE_BASE, seed=seed)
    return {"sets": sets, "seed": seed, "units": True, "samples": True}


def checkpoint_request(config: ModelConfig, checkpoint: Path, batch: Path, *, seed: int = 0) -> dict[str, Any]:
    """The same for an openpi checkpoint and a batch of one's own."""
    for path, what in ((checkpoint, "an openpi checkpoint's params directory"), (batch, "a .npz file of one batch")):
        if not path.exists():
            raise ValueError(f"{path} does not exist; expected {what}; correct --checkpoint or --batch")
    entry = {"arch": arch_of(config), "seed": seed, "checkpoint": str(checkpoint.resolve())}
    return {"sets": {"checkpoint": {**entry, "inputs": str(batch.resolve())}}, "seed": seed}


def record(
    content: dict[str, Any], out: Path, *, venv: Path = VENV, progress: Callable[[str], None] | None = None
) -> None:
    """Runs the recorder; raises ValueError if the venv is missing or openpi's code fails, with its last words."""
    python = venv / "bin" / "python"
    if not python.exists() or not RECORDER.exists():
        missing = python if not python.exists() else RECORDER
        raise ValueError(
            f"{missing} does not exist; live verification runs openpi's JAX code in a venv of its own, from a checkout "
            "of Piston; build it with `make live`, or give its place with --venv"
        )
    if (out / "MANIFEST.json").exists():
        raise ValueError(f"{out} holds a bundle already; expected a new directory; choose another or delete it")
    out.mkdir(parents=True, exist_ok=True)
    (out / "request.json").write_text(json.dumps(content, indent=1) + "\n")
    hidden = ("PYTHONPATH", "PYTHONHOME", "XLA_FLAGS", "JAX_PLATFORMS")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(venv.resolve() / "jax-cache")
    command = [str(python), str(RECORDER), str(out / "request.json"), str(out)]
    pipe = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with (out / LOG).open("w") as log, pipe as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if progress is not None:
                progress(line.strip())
    if process.returncode != 0:
        last = (out / LOG).read_text().strip().splitlines()[-3:]
        raise ValueError(
            f"the recorder stopped with exit code {process.returncode}: {' / '.join(last)}; see {out / LOG}"
        )


def verify_recorded(out: Path, device: str = "cpu") -> Report:
    """Every layer against the bundle in `out`, as one report."""
    bundle = open_bundle(out)
    report = Report("live", str(out))
    for layer in (verify_forward, verify_gradient, verify_curve):
        found = layer(bundle, device)
        report.rows += found.rows
        report.not_compared += found.not_compared
    return report


@dataclass(frozen=True)
class Options:
    """Runs openpi's JAX code in its own venv on fresh architectures and compares Piston with it, array by array."""

    record: Path | None = None  # keep the bundle in this new directory, for the other verify commands' --bundle
    only: tuple[str, ...] = tuple(ARCHITECTURES)  # which architectures; one more, slow: live_full_width
    model: str | None = None  # with --checkpoint: the recipe, or the run.json, that says the architecture
    checkpoint: Path | None = None  # record from this openpi checkpoint (its params directory) instead
    batch: Path | None = None  # with --checkpoint: a .npz with images, masks, state, prompt tokens and actions
    venv: Path = VENV  # the venv that `make live` built
    seed: int = 0  # of weights, inputs and noise
    device: str = "cpu"  # where Piston computes; JAX computes on the CPU
    json: Path | None = None  # also write every row to this file; "-": to standard output, instead of the table


def live_command(args: list[str], prog: str, console: Console) -> int:
    """`piston verify live`: records, compares, prints; 0 if all is equal, 1 if something differs."""
    options = tyro.cli(Options, args=args, prog=prog)
    with tempfile.TemporaryDirectory(prefix="piston-live-") as scratch:
        out = options.record or Path(scratch) / "bundle"
        with console.status("live: openpi is starting") as status:
            record(_request(options), out, venv=options.venv, progress=lambda line: status.update(escape(line)))
            status.update("live: comparing")
            report = verify_recorded(out, options.device)
    if str(options.json) == "-":
        sys.stdout.write(report.to_json() + "\n")
    else:
        render(report, console)
        if options.json is not None:
            options.json.write_text(report.to_json() + "\n")
    return 0 if report.ok else 1


def _request(options: Options) -> dict[str, Any]:
    own = {"--model": options.model, "--checkpoint": options.checkpoint, "--batch": options.batch}
    missing = [name for name, value in own.items() if value is None]
    if len(missing) == len(own):
        return request(options.only, seed=options.seed)
    if options.model is None or options.checkpoint is None or options.batch is None:
        raise ValueError(f"{' and '.join(missing)} missing; {', '.join(own)} go together: they say what to record")
    return checkpoint_request(_architecture(options.model), options.checkpoint, options.batch, seed=options.seed)


def _architecture(name: str) -> ModelConfig:
    """The model of a recipe, or of a run.json."""
    return from_json(Path(name).read_text()).model if Path(name).is_file() else recipe(name).model
