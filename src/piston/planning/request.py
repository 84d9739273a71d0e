"""What is asked of the planner: one frozen dataclass, checked when it is built; `--help` prints its fields."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from piston.config.schema import require
from piston.planning.activations import Checkpointing

Sharding = Literal["none", "ddp", "zero1", "fsdp", "hsdp"]
Kernels = Literal["eager", "stock", "compiled", "xla"]


@dataclass(frozen=True)
class Request:
    """A run to plan. Whatever is None comes from the recipe, the catalogue, the anchors, or is solved for.

    Args:
        subject: a recipe's name, or `seed2` for the π0.5 pre-training note that Piston started from.
        gpu: name in the GPU catalogue.
        gpus: GPUs per node.
        nodes: nodes; None: 1, or solved for when the work and a deadline are given.
        batch: global batch over all GPUs; None: the recipe's.
        cameras: camera slots that the model sees.
        text: prompt tokens, padding included.
        horizon: action steps.
        precision: compute dtype of the transformers.
        ema: keep an exponential average of the weights.
        checkpointing: blocks whose activations are recomputed: none, every second, all.
        kernels: eager (Piston's own operations), stock (PyTorch's fused ones), compiled, xla (JAX).
        sharding: none/ddp replicate; zero1 shards moments; fsdp shards everything; hsdp shards inside a node.
        unit: what FSDP gathers at once.
        gradients: resident until the update, or transient (fused into it, as one measured JAX run suggests).
        efficiency: share of the datasheet peak that executed FLOPs reach; None: the published median.
        anchors: JSON file of measured steps of your own (see docs/plan.md).
        calibration: JSON of `piston profile --json`.
        overlap: share of the network time hidden behind compute.
        overhead: fixed seconds per step, when there is no anchor.
        steps: optimizer steps; None: the recipe's, unless another target is given.
        timesteps: frames to see: steps × batch.
        epochs: passes over the corpus.
        days: deadline.
        budget: money, in the unit of `price`.
        price: money per GPU-hour; Piston ships no prices.
        data: a LeRobot data set to measure.
        hours: hours of data in the corpus, instead of `data`.
        episode_seconds: length of an episode.
        fps: frames per second of the data.
        gb_per_hour: storage rate of the native data.
        gb_per_hour_small: storage rate after re-encoding at model resolution.
        decode_rate: frames decoded per core and second.
        cores: CPU cores per node for the loader.
        network_gbs: network per GPU between nodes, GB/s per direction.
        usable_gb: memory that the framework may use per GPU; None: capacity less the slack.
        slack_gb: context, library buffers and allocator slack.
        storage_gbs: GB/s to the checkpoint storage of one node.
        save_interval: steps between checkpoints; None: the recipe's.
        mtbf_hours: GPU-hours between failures of one GPU's share of a cluster.
        max_nodes: the scenarios go up to here.
        peak_tflops: overrides the catalogue.
        memory_gb: overrides the catalogue.
        bandwidth_gbs: overrides the catalogue.
        link_gbs: overrides the catalogue.
        trace: also run the real model under fake tensors (imports torch; seconds to a minute).
    """

    subject: str = "pi05_libero"
    gpu: str = "H200"
    gpus: int = 8
    nodes: int | None = None
    batch: int | None = None
    cameras: int | None = None
    text: int | None = None
    horizon: int | None = None
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    ema: bool | None = None
    checkpointing: Checkpointing = "full"
    kernels: Kernels = "eager"
    sharding: Sharding = "none"
    unit: Literal["block", "single"] = "block"
    gradients: Literal["resident", "transient"] = "resident"
    efficiency: float | int | None = None
    anchors: Path | None = None
    calibration: Path | None = None
    overlap: float | int | None = None
    overhead: float | int | None = None
    steps: int | None = None
    timesteps: float | int | None = None
    epochs: float | int | None = None
    days: float | int | None = None
    budget: float | int | None = None
    price: float | int | None = None
    data: Path | None = None
    hours: float | int | None = None
    episode_seconds: float | int = 3.0
    fps: float | int = 30.0
    gb_per_hour: float | int | None = None
    gb_per_hour_small: float | int | None = None
    decode_rate: float | int | None = None
    cores: int | None = None
    network_gbs: float | int | None = None
    usable_gb: float | int | None = None
    slack_gb: float | int | None = None
    storage_gbs: float | int = 2.0
    save_interval: int | None = None
    mtbf_hours: float | int | None = None
    max_nodes: int = 8
    peak_tflops: float | int | None = None
    memory_gb: float | int | None = None
    bandwidth_gbs: float | int | None = None
    link_gbs: float | int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            option = "--" + field.name.replace("_", "-")
            zero = field.name in ("overhead", "slack_gb", "overlap", "price")
            good = math.isfinite(value) and (value >= 0 if zero else value > 0)
            require(
                good,
                f"{option} is {value}; it must be a {'non-negative' if zero else 'positive'} finite number: "
                "correct it, or leave it out to use the planner's own",
            )
        for name in ("efficiency", "overlap"):
            value = getattr(self, name)
            require(value is None or value <= 1, f"--{name} is {value}; it is a share, at most 1: give 0.5 for 50 %")
        self._check_targets()
        if self.batch is not None:
            check_batch(self.batch, self.gpus, self.nodes or 1)

    def _check_targets(self) -> None:
        work = [n for n in ("steps", "timesteps", "epochs") if getattr(self, n) is not None]
        require(
            len(work) <= 1,
            f"the work is given {len(work)} times ({', '.join('--' + n for n in work)}); one of them decides the "
            "others: keep one",
        )
        require(
            self.budget is None or self.price is not None,
            f"--budget is {self.budget} but there is no --price; Piston ships no prices: give what a GPU-hour costs "
            "you, "
            "e.g. --price 2.5",
        )
        require(
            self.data is None or self.hours is None,
            "--data and --hours are both given; the data set's own hours are measured: keep one",
        )
        require(
            not (work and self.days is not None and self.nodes is not None),
            f"--{work[0] if work else ''}, --days and --nodes are all given; two of them decide the third: leave one "
            "out",
        )


def check_batch(batch: int, gpus: int, nodes: int) -> None:
    """Raises ValueError, with the nearest batches, if the global batch does not split over all GPUs."""
    world = gpus * nodes
    low, high = batch // world * world, -(-batch // world) * world
    require(
        batch % world == 0,
        f"--batch {batch} is not a multiple of {world} GPUs ({nodes} × {gpus}); every GPU takes the same share of the "
        f"global batch: use {f'{low} or ' if low else ''}{high}",
    )
