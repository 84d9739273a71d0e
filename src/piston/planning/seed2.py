"""The π0.5 pre-training note that Piston started from ("seed 2"): its inputs, so that every figure is recomputed."""

import dataclasses

from piston.planning.published import SIZING
from piston.planning.request import Request
from piston.planning.throughput import Anchor, Anchors

NAME = "seed2"
# Section 02 and 03 of the note: what was measured on the cluster.
ANCHOR = Anchor(batch=64, wall_s=0.48, compute_s=0.23, data_s=0.013, source=f"{SIZING}, live run")
ANCHORS = Anchors((ANCHOR,), gpu="H200", gpus=8, cameras=3, text=200, horizon=50, source=SIZING)
PROFILER_SLOWER = 1.25  # its profiler at 64 per GPU ran about 25 % slower per sample than the anchor
MEMORY_GB, MEMORY_SAMPLES, MEMORY_SLOPE_GB = 45.7, 64, 0.10
MEMORY_FIXED_GB = 39.0  # its own estimate
USABLE_GB = 112.0
CORPUS_GB, CORPUS_HOURS = 73.9, 12.02
SMALL_GB_PER_HOUR = 2.13
FRAME_KB = 52.0  # its claim
VIDEO_SHARE = 0.97
STEPS, TARGET_BATCHES = 700_000, (1024, 2048)
PI0_FRAMES = 903e6
EPISODE_SECONDS, FPS = 3.0, 30.0
EFFICIENCY = (0.85, 0.90, 0.95)
THROUGHPUT_BAND = 0.20
WALL_MARGIN = (0.25, 0.50)
NODES = (2, 4, 8)


def with_defaults(request: Request) -> Request:
    """The request with the note's inputs wherever the user gave none."""
    blanks = {
        "batch": 2048 * (request.nodes or 1),
        "cameras": ANCHORS.cameras,
        "text": ANCHORS.text,
        "horizon": ANCHORS.horizon,
        "ema": False,
        "usable_gb": USABLE_GB,
        "gb_per_hour": CORPUS_GB / CORPUS_HOURS,
        "gb_per_hour_small": SMALL_GB_PER_HOUR,
    }
    changes = {name: value for name, value in blanks.items() if getattr(request, name) is None}
    open_ended = request.budget is not None or (request.days is not None and request.nodes is not None)
    if (request.steps, request.timesteps, request.epochs) == (None,) * 3 and not open_ended:
        changes["timesteps"] = float(STEPS * TARGET_BATCHES[-1])
    return dataclasses.replace(request, gradients="transient", kernels="xla", **changes)
