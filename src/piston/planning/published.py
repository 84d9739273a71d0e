"""What others published: throughput, wall-clock, scaling and memory, as inputs to recompute from; never as results."""

from dataclasses import dataclass
from typing import Literal

from piston.model.cost import Dead

NOTES = "performance notes of the project, 2026"
RLINF = "RLinf and Baidu Baige, OpenPI PyTorch training article (seed 1)"
SIZING = "π0.5 pre-training sizing note (seed 2)"


@dataclass(frozen=True)
class Rate:
    """Samples per second and GPU of one system. None: not reported. The shape is what the model saw."""

    name: str
    system: str
    per_gpu: float | int
    gpus: int
    gpu: str | None
    cameras: int | None
    text: int | None
    horizon: int | None
    dead: Dead
    recompute: Literal["full", "not reported"]
    source: str
    pi05: bool = True
    note: str = ""


@dataclass(frozen=True)
class WallClock:
    """Hours for so many steps of a global batch."""

    name: str
    system: str
    steps: int
    batch: int
    hours: float | int
    gpus: int
    gpu: str | None
    cameras: int | None
    text: int | None
    horizon: int | None
    dead: Dead
    source: str
    why_not: str = ""


@dataclass(frozen=True)
class Scaling:
    """Aggregate throughput at two sizes of one system."""

    name: str
    gpus: tuple[int, int]
    rates: tuple[float | int, float | int]
    step_seconds: float | int | None
    source: str
    stated: float | int | None = None


@dataclass(frozen=True)
class Memory:
    """Peak GB (10⁹ bytes) per GPU. `kind` says whether it was measured or is a README's requirement."""

    name: str
    gigabytes: float | int
    samples: int
    pi05: bool
    lora: bool
    cameras: int
    text: int
    horizon: int
    ema: bool
    style: Literal["jax transient", "jax resident", "ddp stock", "fsdp"]
    kind: Literal["measured", "requirement"]
    known: bool  # whether all that decides it is stated
    source: str
    note: str = ""


def openpi_droid() -> float | int:
    """Samples per second and GPU: 100 000 steps of 256 in about two days on eight GPUs."""
    return 100_000 * 256 / (2 * 86_400) / 8


RATES = (
    Rate("sizing note, fit at 2048", "sizing note", 2048 / (0.23 / 64 * 2048 + 0.25) / 8, 8, "H200", 3, 200, 50,
         "scanned", "full", SIZING, note="extrapolated from one anchor at batch 64"),
    Rate("openpi JAX, DROID", "openpi", openpi_droid(), 8, "H100", 3, 200, 16, "scanned", "full",
         f"openpi README; {NOTES}", note="'~2 days': one significant digit"),
    Rate("LeRobot pi05, 32 per GPU", "lerobot", 12.6, 4, "H100", 2, 200, 50, "computed", "full", NOTES),
    Rate("OpenTau pi05, float32 master", "opentau", (7.6 + 8.3) / 2, 4, "A100", None, None, None, "computed",
         "not reported", NOTES, note="7.6–8.3; cameras and text not reported"),
    Rate("LoongForge pi05 DDP, 12 per GPU", "loongforge", 14.5, 8, "RTX PRO 6000", 2, 200, 50, "computed",
         "not reported", NOTES, note="'P6K' read as RTX PRO 6000: unverified"),
    Rate("RLinf + Baige, optimized", "seed 1", 256 / 1.4589 / 8, 8, None, 2, 200, 10, "computed", "not reported", RLINF,
         note="GPU type not stated"),
    Rate("RLinf + Baige, baseline", "seed 1", 256 / 3.4516 / 8, 8, None, 3, 200, 10, "computed", "not reported", RLINF,
         note="GPU type not stated"),
    Rate("LingBot, 8 GPUs", "lingbot", 28.6, 8, None, None, None, None, "computed", "not reported", NOTES, False,
         "GPU type and shapes not stated"),
    Rate("VLA-Scratch 3B, 128 per GPU", "vla-scratch", 51.0, 8, None, None, None, None, "computed", "not reported",
         NOTES, False, "GPU type and shapes not stated"),
)  # fmt: skip

WALL_CLOCKS = (
    WallClock("openpi DROID, 100 k × 256", "openpi", 100_000, 256, 48, 8, "H100", 3, 200, 16, "scanned",
              "openpi README ('~2 days')"),
    WallClock("openpi DROID, 240 k × 256", "openpi", 240_000, 256, 120, 8, "H100", 3, 200, 16, "scanned",
              "openpi README ('~5 days')"),
    WallClock("LeRobot pi05, 5 000 × 128", "lerobot", 5_000, 128, 3 + 41 / 60, 4, "H100", 2, 200, 50, "computed",
              f"LeRobot; {NOTES}"),
    WallClock("Octo-B, 300 k × 2048", "octo", 300_000, 2048, 14, 128, None, None, None, None, "computed",
              "arXiv:2405.12213", "another architecture, on TPU v4"),
    WallClock("Octo-S, 300 k × 2048", "octo", 300_000, 2048, 8, 128, None, None, None, None, "computed",
              "arXiv:2405.12213", "another architecture, on TPU v4"),
    WallClock("OpenVLA, 64×A100", "openvla", 0, 2048, 14 * 24, 64, "A100", None, None, None, "computed",
              "arXiv:2406.09246", "another architecture, and the steps are not reported"),
)  # fmt: skip

SCALINGS = (
    Scaling("RLinf + Baige, 8 → 256 GPUs", (8, 256), (175.57, 5340.0), 1.4589, RLINF, stated=0.912),
    Scaling("LingBot, 8 → 256 GPUs", (8, 256), (28.6 * 8, 25.0 * 256), None, NOTES),
)

MEMORIES = (
    Memory("sizing note, 64 per GPU", 45.7, 64, True, False, 3, 200, 50, False, "jax transient", "measured", True,
           SIZING,
           "EMA off and gradients transient, as the note's own 39 GB implies"),
    Memory("OpenTau 4×A100, 6 per GPU, eager", 78.45 * 1.073741824, 6, True, False, 3, 200, 50, False, "ddp stock",
           "measured", True, NOTES, "float32 master and gradient buckets; 3 cameras and 200 text assumed"),
    Memory("openpi README, full fine-tune", 70.0, 32, False, False, 3, 48, 50, True, "jax resident", "requirement",
           False, "openpi README ('> 70 GB')", "a GPU size that suffices, not a peak"),
    Memory("openpi README, LoRA", 22.5, 32, False, True, 3, 48, 50, False, "jax resident", "requirement", False,
           "openpi README ('> 22.5 GB')", "a GPU size that suffices, not a peak"),
    Memory("RLinf + Baige, one FSDP unit", 68.37 * 1.073741824, 32, True, False, 3, 200, 10, False, "fsdp", "measured",
           False, RLINF, "checkpointing, kernels and gather dtype not stated"),
    Memory("RLinf + Baige, per-block units", 32.45 * 1.073741824, 32, True, False, 2, 200, 10, False, "fsdp",
           "measured", False, RLINF, "checkpointing, kernels and gather dtype not stated"),
)  # fmt: skip
