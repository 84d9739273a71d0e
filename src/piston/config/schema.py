"""What a run is: frozen dataclasses, checked when they are built. Imports nothing from Piston and no torch.

Names follow openpi's training configuration where it has one. Precedence: recipe, then command line; nothing else.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PALIGEMMA_VOCAB_SIZE = 257_152
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
SHIPPED_TOKENIZER = Path("shipped")  # in DataConfig.tokenizer: Piston's own small tokenizer, for models from scratch
NO_CACHE = Path("off")  # in DataConfig.cache: read original frames, whatever cache there is


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) for a configuration that cannot run."""
    if not condition:
        raise ValueError(message)


LARGEST_BATCH = 2**24  # samples of one step: beyond any run, and far below what overflows an index


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of one kind of layer. Attention scales by alpha/rank (or alpha/√rank); FFN does not scale."""

    rank: int
    alpha: float = 1.0
    rslora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class GemmaConfig:
    """One expert of the joint transformer."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora_attn: LoraConfig | None = None
    lora_ffn: LoraConfig | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim"):
            require(getattr(self, name) >= 1, f"{name} of an expert is {getattr(self, name)}; it must be 1 or more")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
            "query heads are grouped over key/value heads: change one of them",
        )
        require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; RoPE rotates pairs: use an even head_dim")
        require(
            self.width % 2 == 0,
            f"width {self.width} is odd; the time embedding needs sin and cos halves: use an even one",
        )


@dataclass(frozen=True)
class SiglipConfig:
    """The vision tower."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: tuple[int, int] = (14, 14)

    def __post_init__(self) -> None:
        for name in ("width", "depth", "mlp_dim", "num_heads"):
            require(getattr(self, name) >= 1, f"{name} of SigLIP is {getattr(self, name)}; it must be 1 or more")
        require(min(self.patch_size) >= 1, f"patch_size is {self.patch_size}; both sides must be 1 or more")
        require(
            self.width % self.num_heads == 0,
            f"SigLIP width {self.width} is not a multiple of num_heads {self.num_heads}; change one of them",
        )


# Sizes: openpi models/gemma.py, models/siglip.py.
GEMMA_VARIANTS: dict[str, GemmaConfig] = {
    "dummy": GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
    "gemma_300m": GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_2b": GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
}
GEMMA_VARIANTS["gemma_2b_lora"] = dataclasses.replace(
    GEMMA_VARIANTS["gemma_2b"], lora_attn=LoraConfig(16, 16.0), lora_ffn=LoraConfig(16, 16.0)
)
GEMMA_VARIANTS["gemma_300m_lora"] = dataclasses.replace(
    GEMMA_VARIANTS["gemma_300m"], lora_attn=LoraConfig(32, 32.0), lora_ffn=LoraConfig(32, 32.0)
)
SO400M = SiglipConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16)


@dataclass(frozen=True)
class ModelConfig:
    """π0 (`pi05=False`) or π0.5 at any size. Parameters are float32; `dtype` is the transformers' compute dtype."""

    pi05: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    paligemma: GemmaConfig = GEMMA_VARIANTS["gemma_2b"]
    action_expert: GemmaConfig = GEMMA_VARIANTS["gemma_300m"]
    siglip: SiglipConfig = SO400M
    vocab_size: int = PALIGEMMA_VOCAB_SIZE
    image_size: tuple[int, int] = (224, 224)  # height, width
    cameras: tuple[str, ...] = CAMERAS  # the prefix order; "wrist" in a name: no geometric augmentation
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int = 48  # π0: 48, π0.5: 200
    discrete_state_input: bool = False  # π0.5: the state goes into the prompt as 256-bin text
    freeze: tuple[Literal["vision", "vlm", "expert", "heads"], ...] = ()  # not trained, in bfloat16; LoRA adapters are

    def __post_init__(self) -> None:
        vlm, expert = self.paligemma, self.action_expert
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            a, b = getattr(vlm, name), getattr(expert, name)
            require(
                a == b,
                f"paligemma.{name} is {a}, action_expert.{name} is {b}; the experts share attention: make them equal",
            )
        height, width = self.image_size
        require(min(self.image_size) >= 1, f"image_size is {self.image_size}; height and width must be 1 or more")
        require(
            height % self.siglip.patch_size[0] == 0 and width % self.siglip.patch_size[1] == 0,
            f"image_size {self.image_size} is not a multiple of patch_size {self.siglip.patch_size}; change one",
        )
        require(len(self.cameras) > 0, "cameras is empty; the model needs at least one camera slot")
        require(
            self.pi05 or not self.discrete_state_input,
            "discrete_state_input is on but pi05 is off; π0 reads the state as a token: switch one of them",
        )
        adapted = any(gemma.lora_attn is not None or gemma.lora_ffn is not None for gemma in (vlm, expert))
        require(
            len(set(self.freeze)) < 4 or adapted,
            f"model.freeze is {self.freeze}, the whole model, and there are no LoRA adapters; expected something left "
            "to train: leave a group out",
        )
        for name in ("action_dim", "action_horizon", "max_token_len", "vocab_size"):
            require(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}; it must be positive")

    @property
    def patches(self) -> int:
        """Image tokens per camera, P."""
        return (self.image_size[0] // self.siglip.patch_size[0]) * (self.image_size[1] // self.siglip.patch_size[1])

    @property
    def prefix_len(self) -> int:
        """Prefix tokens, T = C·P + L."""
        return len(self.cameras) * self.patches + self.max_token_len

    @property
    def suffix_len(self) -> int:
        """Suffix tokens, S = A for π0.5, A + 1 for π0 (state token)."""
        return self.action_horizon + (0 if self.pi05 else 1)


@dataclass(frozen=True)
class RobotConfig:
    """How one robot's LeRobot columns become the model's inputs, and how actions become the robot's again.

    `cameras` maps a model camera slot to the data set's image key; a slot that is left out is an absent camera (black,
    masked). `delta_mask` counts dimensions: (6, -1) makes six deltas and leaves one absolute; () means no deltas.
    """

    name: str
    cameras: dict[str, str]
    state_keys: tuple[str, ...]  # concatenated in this order
    action_key: str
    state_dim: int
    action_dim: int
    delta_mask: tuple[int, ...] = ()
    adapt_to_pi: bool = False  # ALOHA joint signs and gripper units ↔ π's own runtime
    fps: int | None = None  # None: whatever the data set says

    def __post_init__(self) -> None:
        covered = sum(abs(n) for n in self.delta_mask)
        require(
            covered <= self.action_dim,
            f"robot {self.name}: delta_mask {self.delta_mask} covers {covered} dimensions, actions have "
            f"{self.action_dim}; shorten the mask",
        )
        ends = [sum(abs(n) for n in self.delta_mask[: i + 1]) for i, n in enumerate(self.delta_mask) if n > 0]
        require(
            max(ends, default=0) <= self.state_dim,
            f"robot {self.name}: delta_mask {self.delta_mask} subtracts the state from action dimensions up to "
            f"{max(ends, default=0)}, the state has {self.state_dim}; shorten the mask",
        )
        require(
            not self.adapt_to_pi or (self.state_dim, self.action_dim) == (14, 14),
            f"robot {self.name}: adapt_to_pi is on for {self.state_dim} state and {self.action_dim} action dimensions; "
            "it converts ALOHA's two arms of 6 joints and a gripper, 14 of each: switch it off for other robots",
        )


@dataclass(frozen=True)
class DataConfig:
    """Which data set, how its samples become model inputs, and how they are loaded."""

    root: Path | None = None  # a LeRobot v2.0, v2.1 or v3.0 directory
    repo_id: str = "local"  # the data set's name; also openpi's asset_id for norm stats
    robot: RobotConfig = field(
        default_factory=lambda: RobotConfig(
            name="generic",
            cameras={"base_0_rgb": "observation.images.top"},
            state_keys=("observation.state",),
            action_key="action",
            state_dim=14,
            action_dim=14,
        )
    )
    prompt_from_task: bool = True  # the prompt is the frame's task text
    default_prompt: str | None = None  # used only where a sample has no prompt
    use_quantile_norm: bool = False  # π0.5: q01/q99 to [-1, 1]; π0: z-score
    norm_stats: Path | None = None  # None: assets/<recipe>/<repo_id>/norm_stats.json
    tokenizer: Path | None = None  # a sentencepiece .model or a tokenizer.json; `shipped`: Piston's own small one
    tolerance_s: float = 1e-4  # largest |timestamp - frame grid| accepted, seconds
    bad_episodes: Literal["fail", "skip"] = "fail"
    validation_fraction: float = 0.0  # share of episodes held out
    augment: bool = True  # crop, rotate and colour jitter in training
    num_workers: int = 2  # loader processes; 0 loads in the main process
    prefetch: int = 2  # batches ready ahead, per worker
    prefetch_gib: float = (
        8.0  # most memory of all finished batches together; fewer are made ahead, then by fewer workers
    )
    cache: Path | None = None  # a frame cache; None: the data set's own, if it has one; `off`: original frames

    def __post_init__(self) -> None:
        require(
            0.0 <= self.validation_fraction < 1.0,
            f"validation_fraction is {self.validation_fraction}; expected 0 ≤ fraction < 1",
        )
        require(self.num_workers >= 0, f"num_workers is {self.num_workers}; it must be 0 or more")
        require(self.prefetch >= 1, f"prefetch is {self.prefetch}; it must be 1 or more")
        require(self.prefetch_gib > 0, f"prefetch_gib is {self.prefetch_gib}; it must be positive")
        require(self.tolerance_s > 0, f"tolerance_s is {self.tolerance_s}; it must be positive")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, schedule, clip and EMA with the reference's formulas (optax 0.2.4, openpi training/optimizer.py)."""

    schedule: Literal["cosine", "rsqrt"] = "cosine"
    warmup_steps: int = 1000
    peak_lr: float = 2.5e-5
    decay_steps: int = 30_000  # cosine: total, warm-up included
    decay_lr: float = 2.5e-6  # cosine: final learning rate
    timescale: float = 10_000.0  # rsqrt only
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-10
    clip_gradient_norm: float = 1.0
    ema_decay: float | None = 0.99  # None: no EMA

    def __post_init__(self) -> None:
        require(self.peak_lr > 0, f"optim.peak_lr is {self.peak_lr}; it must be positive")
        for name, low, high in (
            ("decay_lr", 0.0, math.inf), ("timescale", 1e-9, math.inf), ("b1", 0.0, 1.0), ("b2", 0.0, 1.0),
            ("eps", 0.0, math.inf), ("weight_decay", 0.0, math.inf),
        ):  # fmt: skip
            value = getattr(self, name)
            require(low <= value < high, f"optim.{name} is {value}; expected {low:g} ≤ {name} < {high:g}")
        require(self.warmup_steps >= 0, f"optim.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        require(
            self.schedule != "cosine" or self.decay_steps > self.warmup_steps,
            f"optim.decay_steps {self.decay_steps} does not exceed warmup_steps {self.warmup_steps}; "
            "decay_steps counts the warm-up too: raise it or shorten the warm-up",
        )
        require(
            self.ema_decay is None or 0.0 <= self.ema_decay < 1.0,
            f"optim.ema_decay is {self.ema_decay}; expected 0 ≤ decay < 1, or None for no EMA",
        )
        require(self.clip_gradient_norm > 0, f"optim.clip_gradient_norm is {self.clip_gradient_norm}; must be positive")


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    exp_name: str = "run"
    batch_size: int = 32  # global batch
    num_train_steps: int = 30_000
    accumulate: int = 1  # micro-batches per step; divides batch_size
    seed: int = 42
    device: str = "auto"  # auto: cuda if there is one, else cpu
    threads: int | None = None  # CPU threads of the trainer (loader workers have one each); None: torch's choice
    init: Path | None = None  # weights to start from: openpi (JAX, PyTorch), LeRobot, RLinf, Piston, PaliGemma's npz
    init_except: tuple[str, ...] = ()  # parameters that stay as initialised: vision, vlm, expert, heads, or names
    checkpoint_dir: Path = Path("checkpoints")  # a run lives in <checkpoint_dir>/<recipe>/<exp_name>
    resume: bool = False
    overwrite: bool = False
    log_interval: int = 100
    save_interval: int = 1000
    keep_last: int = 1  # newest checkpoints kept
    keep_period: int | None = 5000  # checkpoints kept for good, every so many steps
    validation_interval: int = 1000
    validation_batches: int = 8
    tensorboard: bool = False
    wandb: bool = False
    project_name: str = "piston"

    def __post_init__(self) -> None:
        for name in (
            "batch_size", "num_train_steps", "accumulate", "threads", "log_interval", "save_interval", "keep_last",
            "keep_period", "validation_interval", "validation_batches",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value >= 1, f"train.{name} is {value}; it must be 1 or more")
        require(
            self.batch_size <= LARGEST_BATCH,
            f"train.batch_size is {self.batch_size}; at most {LARGEST_BATCH:,} samples can make one step",
        )
        require(
            Path(self.exp_name).name == self.exp_name and self.exp_name not in ("", ".", ".."),
            f"train.exp_name is {self.exp_name!r}; expected the name of one folder: to put a run elsewhere, set "
            "--train.checkpoint-dir",
        )
        require(
            self.batch_size % self.accumulate == 0,
            f"train.batch_size {self.batch_size} is not a multiple of train.accumulate {self.accumulate}; change one",
        )
        require(
            self.init is not None or not self.init_except,
            f"train.init_except is {self.init_except} without train.init; it lists what not to take from a checkpoint: "
            "name the checkpoint with --train.init",
        )
        require(
            not (self.resume and self.overwrite),
            "train.resume and train.overwrite are both on; resume continues a run, overwrite deletes it: choose one "
            "(--train.no-resume or --train.no-overwrite)",
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is. `run.json` holds one of these; `--from run.json` repeats it."""

    name: str
    model: ModelConfig = ModelConfig()
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        robot, model = self.data.robot, self.model
        for name, width in (("action_dim", robot.action_dim), ("state_dim", robot.state_dim)):
            require(
                width <= model.action_dim,
                f"robot {robot.name} has {name} {width}, the model has action_dim {model.action_dim}; states and "
                "actions are padded up to it, never cut: raise --model.action_dim",
            )
        unknown = sorted(set(robot.cameras) - set(model.cameras))
        require(
            not unknown,
            f"robot {robot.name} maps cameras {unknown} that the model does not have; "
            f"its slots are {list(model.cameras)}: rename them in the robot's entry",
        )
