"""Draws simulated episodes: what both cameras saw, moment by moment, into one PNG file."""

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from piston.demo.planar_arm import COLOURS, PROMPTS, ArmConfig, render
from piston.serve.evaluate import Rollout

SHARP = 224  # pixels of the drawn pictures; the policy saw ArmConfig.image_size
MOMENTS = 6


def draw_rollout(path: Path, arm: ArmConfig, rollout: Rollout, *, episodes: int = len(COLOURS)) -> None:
    """One pair of rows per episode: base camera with the hand's path so far, and wrist camera below it."""
    episodes = min(episodes, len(rollout.scenes))
    steps = np.linspace(0, len(rollout.hand_TN2) - 1, MOMENTS).astype(int)
    figure = Figure(figsize=(1.7 * MOMENTS, 3.6 * episodes), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * episodes, MOMENTS, squeeze=False)
    sharp = dataclasses.replace(arm, image_size=SHARP)
    for episode in range(episodes):
        blocks_TK2 = np.broadcast_to(rollout.scenes[episode].blocks_K2, (MOMENTS, len(COLOURS), 2))
        pictures = render(sharp, rollout.hand_TN2[steps, episode], blocks_TK2)
        for column, step in enumerate(steps):
            above, below = axes[2 * episode, column], axes[2 * episode + 1, column]
            above.imshow(pictures["base"][column])
            above.plot(*_pixels(arm, rollout.hand_TN2[: step + 1, episode]), color="white", linewidth=1)
            above.set_title(f"{step / arm.fps:.1f} s", fontsize=8)
            below.imshow(pictures["wrist"][column])
            for axis in (above, below):
                axis.set_xticks([])
                axis.set_yticks([])
        outcome = "reached" if rollout.reached_N[episode] else "missed"
        axes[2 * episode, 0].set_ylabel(f"“{PROMPTS[rollout.asked_N[episode]]}”\n{outcome}\n\nbase camera", fontsize=8)
        axes[2 * episode + 1, 0].set_ylabel("wrist camera", fontsize=8)
    figure.savefig(path, dpi=120)


def _pixels(arm: ArmConfig, hand_T2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Column and row, in the sharp base picture, of positions on the table."""
    scale = SHARP / arm.base_view
    corner = 0.5 - arm.base_view / 2
    return (hand_T2[:, 0] - corner) * scale - 0.5, SHARP - (hand_T2[:, 1] - corner) * scale - 0.5
