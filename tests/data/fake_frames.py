"""A data set in memory as the loader sees one, and an inputs transform: small, fast, and they can be told to fail."""

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piston.config.schema import DataConfig, GemmaConfig, ModelConfig, RobotConfig, RunConfig, SiglipConfig, TrainConfig

H, W = 28, 28


def tiny_run(**train: Any) -> RunConfig:
    """A π0.5 small enough for a step in milliseconds: two of three cameras, 14 tokens of prompt."""
    gemma = GemmaConfig(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    return RunConfig(
        "tiny",
        ModelConfig(
            pi05=True,
            dtype="float32",
            paligemma=gemma,
            action_expert=gemma,
            siglip=SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2),
            vocab_size=64,
            image_size=(H, W),
            action_dim=6,
            action_horizon=5,
            max_token_len=14,
        ),
        DataConfig(
            robot=RobotConfig(
                "fake", {"base_0_rgb": "top", "left_wrist_0_rgb": "wrist"}, ("joints", "gripper"), "action", 4, 3
            ),
            num_workers=0,
        ),
        train=TrainConfig(**{"batch_size": 8, **train}),
    )


@dataclass
class FakeFrames:
    """Episodes of 7, 8, 9, … frames; image and column values tell their row and camera."""

    episodes: int = 6
    fps: float = 10.0
    image_keys: tuple[str, ...] = ("top", "wrist")
    episode_index: np.ndarray = field(init=False)
    episode_starts: np.ndarray = field(init=False)
    fail_row: int = -1  # images() raises on this row
    kill_row: int = -1  # images() kills its process on this row
    calls: int = 0

    def __post_init__(self) -> None:
        self.episode_index = np.arange(self.episodes) + 100
        self.episode_starts = np.concatenate([[0], np.cumsum(np.arange(self.episodes) + 7)])

    @property
    def num_frames(self) -> int:
        return int(self.episode_starts[-1])

    def column(self, key: str) -> np.ndarray:
        rows = np.arange(self.num_frames, dtype=np.float32)
        if key == "gripper":
            return rows % 2
        width = {"joints": 3, "action": 3}[key]
        values = np.sin(rows[:, None] * (0.1 + np.arange(width)))
        return values.astype(np.float32)

    def episode_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.episode_starts, rows, side="right") - 1

    def chunk_rows(self, row: int, horizon: int) -> np.ndarray:
        last = self.episode_starts[self.episode_of(np.array([row]))[0] + 1] - 1
        return np.minimum(row + np.arange(horizon), last)

    def task(self, row: int) -> str:
        return f"task {self.episode_of(np.array([row]))[0] % 2}"

    def images(self, key: str, rows: np.ndarray) -> np.ndarray:
        if self.fail_row in rows:
            raise ValueError(f"cannot decode camera {key}")
        if self.kill_row in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        value = (rows[:, None, None, None] * 2 + (key == "wrist")) % 256
        return np.broadcast_to(value.astype(np.uint8), (len(rows), H, W, 3)).copy()

    def select(self, positions: np.ndarray) -> "FakeFrames":
        chosen = FakeFrames(len(positions), self.fps, self.image_keys)
        chosen.episode_index = self.episode_index[positions]
        chosen.episode_starts = np.concatenate([[0], np.cumsum(np.diff(self.episode_starts)[positions])])
        return chosen


@dataclass(frozen=True)
class FakeInputs:
    """The robot's sample, padded; tokens are the task's letters. Always raises `error` if there is one."""

    run: RunConfig
    error: type[Exception] | None = None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error("broken transform")
        model = self.run.model
        images = np.zeros((len(model.cameras), *model.image_size, 3), np.uint8)
        mask = np.zeros(len(model.cameras), bool)
        for slot, image in sample["images"].items():
            images[model.cameras.index(slot)] = image
            mask[model.cameras.index(slot)] = True
        tokens = np.zeros(model.max_token_len, np.int32)
        letters = [ord(c) % model.vocab_size for c in sample["prompt"]]
        tokens[: len(letters)] = letters
        return {
            "images": images,
            "image_masks": mask,
            "state": np.pad(sample["state"], (0, model.action_dim - len(sample["state"]))),
            "actions": np.pad(sample["actions"], ((0, 0), (0, model.action_dim - sample["actions"].shape[1]))),
            "tokenized_prompt": tokens,
            "tokenized_prompt_mask": np.arange(model.max_token_len) < len(letters),
        }
