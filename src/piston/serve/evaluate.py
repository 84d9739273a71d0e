"""How good is a checkpoint? Success in the simulator with intervals and ablations, or error on recorded episodes.

Closed loop, all episodes run side by side: the policy sees both cameras and the prompt, some actions of its chunk are
carried out, and it sees again. Scenes come from a stream of their own, which no recording uses.
"""

import contextlib
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from jaxtyping import Bool, Float, Int64
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from piston.config.schema import RobotConfig, RunConfig
from piston.data.lerobot import Dataset, open_dataset
from piston.data.order import split_episodes
from piston.demo.planar_arm import COLOURS, PROMPTS, ArmConfig, PlanarArms, Scene, scene
from piston.demo.record import IMAGE_KEYS
from piston.serve.policy import Policy, RawSample
from piston.train.checkpoint import open_checkpoint, whole_checkpoints

EVALUATION_STREAM = 1_000_000  # added to the seed: recordings use small seeds
Z_95 = 1.959963984540054


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a success rate."""
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == trials else centre + half


@dataclass(frozen=True)
class Condition:
    """One way of running the same episodes: what is taken away from the policy, or told wrongly."""

    name: str
    untrained: bool = False
    hide: str | None = None  # a simulator camera that the policy does not get
    other_prompt: bool = False  # the prompt asks for the next colour instead


TRAINED = Condition("trained")
COMPARISONS = (
    TRAINED,
    Condition("untrained", untrained=True),
    Condition("trained, no base camera", hide="base"),
    Condition("trained, no wrist camera", hide="wrist"),
    Condition("trained, told another colour", other_prompt=True),
)


@dataclass(frozen=True)
class Rollout:
    """N episodes under one condition. `asked_N` is the colour in the prompt, `scenes[i].target` the episode's own."""

    condition: Condition
    scenes: list[Scene]
    asked_N: Int64[np.ndarray, "N"]
    reached_N: Bool[np.ndarray, "N"]  # the episode's own block was held
    held_other_N: Bool[np.ndarray, "N"]  # the block that the prompt asked for was held, where it asked for another
    hand_TN2: Float[np.ndarray, "T N 2"]

    @property
    def successes(self) -> int:
        return int(self.reached_N.sum())

    def row(self) -> dict[str, Any]:
        """Counts, rate and interval, in all and per task, as plain JSON values."""
        tasks = {PROMPTS[k]: _rate(self.reached_N[[s.target == k for s in self.scenes]]) for k in range(len(COLOURS))}
        extra = {"obeyed_the_other_prompt": _rate(self.held_other_N)} if self.condition.other_prompt else {}
        return {"condition": self.condition.name, **_rate(self.reached_N), **extra, "tasks": tasks}


def _rate(reached_N: Bool[np.ndarray, "N"]) -> dict[str, Any]:
    successes, trials = int(reached_N.sum()), len(reached_N)
    low, high = wilson(successes, trials)
    return {"successes": successes, "episodes": trials, "rate": successes / max(trials, 1), "low": low, "high": high}


def evaluation_scenes(arm: ArmConfig, episodes: int, seed: int) -> list[Scene]:
    """Scenes that no recording holds; the colours take turns."""
    return [scene(arm, EVALUATION_STREAM + seed, number) for number in range(episodes)]


def roll_out(
    policy: Policy,
    arm: ArmConfig,
    scenes: list[Scene],
    condition: Condition = TRAINED,
    *,
    execute: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Runs every scene for `arm.max_steps` steps, `execute` actions of each chunk; deterministic in all arguments."""
    if not 1 <= execute <= policy.horizon:
        raise ValueError(
            f"execute is {execute}; expected 1 to {policy.horizon}, the actions in a chunk: change --execute"
        )
    arms, count = PlanarArms(arm, scenes), len(scenes)
    asked_N = (arms.target_N + int(condition.other_prompt)) % len(COLOURS)
    others = PlanarArms(arm, [dataclasses.replace(s, target=int(k)) for s, k in zip(scenes, asked_N, strict=True)])
    hands = [arms.hand_N2]
    for step in range(0, arm.max_steps, execute):
        samples = _observe(arms, asked_N, policy.run.data.robot, condition.hide)
        numbers = [episode * arm.max_steps + step for episode in range(count)]
        with _cameras_missing_on_purpose() if condition.hide else contextlib.nullcontext():
            actions_NAD = policy.infer_batch(samples, seed=seed, numbers=numbers).astype(np.float64)
        for k in range(min(execute, arm.max_steps - step)):
            arms.step(actions_NAD[:, k])
            others.step(actions_NAD[:, k])
            hands.append(arms.hand_N2)
        if progress is not None:
            progress(min(step + execute, arm.max_steps), arm.max_steps)
    return Rollout(condition, scenes, asked_N, arms.reached_N, others.reached_N, np.stack(hands))


@contextlib.contextmanager
def _cameras_missing_on_purpose() -> Iterator[None]:
    """Keeps the transforms from warning about a camera that a condition hides."""
    logger = logging.getLogger("piston.data.transforms")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _observe(arms: PlanarArms, asked_N: np.ndarray, robot: RobotConfig, hide: str | None) -> list[RawSample]:
    """What the robot reports, under the model's camera slots; a hidden camera is absent."""
    images = {IMAGE_KEYS[camera]: pictures for camera, pictures in arms.images().items() if camera != hide}
    slots = {slot: images[key] for slot, key in robot.cameras.items() if key in images}
    state_NS = arms.state()
    return [
        {
            "images": {slot: pictures[i] for slot, pictures in slots.items()},
            "state": state_NS[i],
            "prompt": PROMPTS[asked_N[i]],
        }
        for i in range(len(state_NS))
    ]


def check_robot(run: RunConfig) -> None:
    """Raises ValueError if the checkpoint was not trained on the planar arm."""
    if not set(run.data.robot.cameras.values()) <= set(IMAGE_KEYS.values()):
        raise ValueError(
            f"the checkpoint's robot is {run.data.robot.name} with cameras {sorted(run.data.robot.cameras.values())}; "
            f"--sim planar-arm has {sorted(IMAGE_KEYS.values())}: evaluate it with --open-loop DATA_SET instead"
        )


# --- open loop -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenLoop:
    """Errors of predicted against recorded actions, in the robot's units, over the whole chunk."""

    rows: int
    episodes: int
    held_out: bool
    names: list[str]
    mean_abs_D: Float[np.ndarray, "D"]
    rms_D: Float[np.ndarray, "D"]
    std_D: Float[np.ndarray, "D"]  # of the recorded actions: what always answering their mean would score as rms

    def to_json(self) -> dict[str, Any]:
        dims = zip(self.names, self.mean_abs_D, self.rms_D, self.std_D, strict=True)
        return {
            "rows": self.rows,
            "episodes": self.episodes,
            "held_out": self.held_out,
            "dimensions": [
                {"name": name, "mean_abs": float(a), "rms": float(r), "recorded_std": float(s)}
                for name, a, r, s in dims
            ],
        }


def open_loop(
    policy: Policy, root: Path, *, max_rows: int, batch: int = 64, progress: Callable[[int, int], None] | None = None
) -> OpenLoop:
    """Asks the policy at evenly spread frames and compares with what was recorded there.

    On the data set it was trained on, only the episodes that the run held out; all of them where it held out none.
    """
    run = policy.run
    ds = open_dataset(root, tolerance_s=run.data.tolerance_s, bad_episodes=run.data.bad_episodes)
    _, held_out = split_episodes(run.train.seed, ds.num_episodes, run.data.validation_fraction)
    if len(held_out):
        ds = ds.select(held_out)
    rows = np.unique(np.linspace(0, ds.num_frames - 1, min(max_rows, ds.num_frames)).astype(np.int64))
    errors, recorded = [], []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        samples, actions_BAD = _recorded(ds, run, part)
        errors.append(policy.infer_batch(samples, numbers=part.tolist()) - actions_BAD)
        recorded.append(actions_BAD)
        if progress is not None:
            progress(start + len(part), len(rows))
    error_nD, recorded_nD = (np.concatenate(parts).reshape(-1, errors[0].shape[-1]) for parts in (errors, recorded))
    return OpenLoop(
        rows=len(rows),
        episodes=ds.num_episodes,
        held_out=bool(len(held_out)),
        names=_action_names(ds, run.data.robot),
        mean_abs_D=np.abs(error_nD).mean(0).astype(np.float64),
        rms_D=np.sqrt(np.square(error_nD).mean(0)).astype(np.float64),
        std_D=recorded_nD.std(0).astype(np.float64),
    )


def _recorded(ds: Dataset, run: RunConfig, rows: np.ndarray) -> tuple[list[RawSample], np.ndarray]:
    """Observations as the robot would report them at some rows, and the chunks recorded from there on."""
    robot, horizon = run.data.robot, run.model.action_horizon
    images = {slot: ds.images(key, rows) for slot, key in robot.cameras.items()}
    samples: list[RawSample] = []
    chunks = []
    for i, row in enumerate(rows.tolist()):
        state = np.concatenate([ds.column(key)[row].reshape(-1) for key in robot.state_keys]).astype(np.float32)
        prompt = ds.task(row) if run.data.prompt_from_task else None
        samples.append({"images": {slot: images[slot][i] for slot in images}, "state": state, "prompt": prompt})
        chunks.append(ds.column(robot.action_key)[ds.chunk_rows(row, horizon)].reshape(horizon, -1))
    return samples, np.stack(chunks).astype(np.float32)


def _action_names(ds: Dataset, robot: RobotConfig) -> list[str]:
    names = ds.features.get(robot.action_key, {}).get("names")
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(names) == robot.action_dim:
        return [str(name) for name in names]
    return [f"{robot.action_key}[{i}]" for i in range(robot.action_dim)]


# --- the command -----------------------------------------------------------------------------------------------------


def find_checkpoint(path: Path) -> Path:
    """A checkpoint directory itself, or the newest whole one of an experiment's directory."""
    if whole := whole_checkpoints(path):
        return whole[-1].path
    return open_checkpoint(path, files=()).path


def evaluate_command(args: list[str], prog: str, console: Console) -> int:
    """`piston eval`: prints a table; exit code 0."""

    def options(
        checkpoint: tyro.conf.Positional[Path],
        sim: Literal["planar-arm"] | None = None,
        open_loop: Path | None = None,
        episodes: int = 100,
        seed: int = 0,
        execute: int = 3,
        steps: int = 10,
        compare: bool = False,
        max_rows: int = 512,
        device: str = "cpu",
        json: Path | None = None,
        picture: Path | None = None,
    ) -> dict[str, Any]:
        """Success rate of a checkpoint in a simulator, or its error on recorded episodes.

        Args:
            checkpoint: a checkpoint's directory, or an experiment's, which stands for its newest checkpoint.
            sim: run it closed-loop in this simulator.
            open_loop: compare with the actions of this LeRobot data set, dimension by dimension.
            episodes: episodes of each condition (--sim).
            seed: of the scenes and of the policy's noise.
            execute: actions carried out of each chunk before the policy looks again (--sim).
            steps: Euler steps from noise to actions.
            compare: also run the untrained model, the policy without each camera, and told another colour (--sim).
            max_rows: frames to compare at, evenly spread (--open-loop).
            device: where the model computes.
            json: write the result to this file ("-" for standard output instead of the table).
            picture: draw some episodes into this PNG file (--sim).
        """
        return locals()

    asked = tyro.cli(options, args=args, prog=prog)
    if (asked["sim"] is None) == (asked["open_loop"] is None):
        raise ValueError(
            f"{prog} got {'both' if asked['sim'] else 'neither'} of --sim and --open-loop; give one of them"
        )
    path = find_checkpoint(asked["checkpoint"])
    report = _simulate(path, asked, console) if asked["sim"] else _replay(path, asked, console)
    if asked["json"] is not None:
        text = json.dumps({"checkpoint": str(path), **report}, indent=2) + "\n"
        if str(asked["json"]) == "-":
            sys.stdout.write(text)
        else:
            asked["json"].write_text(text)
    return 0


def _simulate(path: Path, asked: dict[str, Any], console: Console) -> dict[str, Any]:
    arm = ArmConfig()
    scenes = evaluation_scenes(arm, asked["episodes"], asked["seed"])
    policies = {False: Policy.from_checkpoint(path, asked["device"], num_steps=asked["steps"])}
    check_robot(policies[False].run)
    conditions = COMPARISONS if asked["compare"] else (TRAINED,)
    if asked["compare"]:
        policies[True] = Policy.from_checkpoint(path, asked["device"], untrained=True, num_steps=asked["steps"])
    rollouts = []
    with Progress(console=console, transient=True) as bar:
        for condition in conditions:
            task = bar.add_task(condition.name, total=arm.max_steps)
            rollouts.append(
                roll_out(
                    policies[condition.untrained], arm, scenes, condition, execute=asked["execute"], seed=asked["seed"],
                    progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),
                )
            )  # fmt: skip
    if str(asked["json"]) != "-":
        console.print(rollout_table(rollouts))
    if asked["picture"] is not None:
        from piston.serve.picture import draw_rollout

        draw_rollout(asked["picture"], arm, rollouts[0])
        console.print(f"episodes drawn in {asked['picture']}", highlight=False)
    return {"sim": asked["sim"], "execute": asked["execute"], "conditions": [rollout.row() for rollout in rollouts]}


def rollout_table(rollouts: Sequence[Rollout]) -> Table:
    """Success rates with 95 % intervals, in all and per task."""
    table = Table(title="closed loop: the right block was reached and held (95 % Wilson interval)")
    table.add_column("policy")
    for heading in ("success", "interval", *COLOURS):
        table.add_column(heading, justify="right", no_wrap=True)
    for rollout in rollouts:
        row = rollout.row()
        table.add_row(row["condition"], *_cells(row), *(_cells(task)[0] for task in row["tasks"].values()))
        if rollout.condition.other_prompt:
            table.add_row("… reached what it was told", *_cells(row["obeyed_the_other_prompt"]))
    return table


def _cells(rate: dict[str, Any]) -> tuple[str, str]:
    """Successes of episodes with the rate's interval."""
    return f"{rate['successes']}/{rate['episodes']}", f"{100 * rate['low']:.0f}–{100 * rate['high']:.0f} %"


def _replay(path: Path, asked: dict[str, Any], console: Console) -> dict[str, Any]:
    policy = Policy.from_checkpoint(path, asked["device"], num_steps=asked["steps"])
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("open loop", total=asked["max_rows"])
        result = open_loop(
            policy,
            asked["open_loop"],
            max_rows=asked["max_rows"],
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if str(asked["json"]) != "-":
        which = "held-out episodes" if result.held_out else "episodes, none of them held out of training"
        table = Table(title=f"open loop: {result.rows} frames of {result.episodes} {which}, robot's units")
        for heading in ("action", "mean |error|", "rms error", "std of the recording", "explained"):
            table.add_column(heading, justify="left" if heading == "action" else "right")
        for name, mean_abs, rms, std in zip(result.names, result.mean_abs_D, result.rms_D, result.std_D, strict=True):
            explained = f"{1 - (rms / std) ** 2:.0%}" if std > 0 else "constant"
            table.add_row(name, f"{mean_abs:.4f}", f"{rms:.4f}", f"{std:.4f}", explained)
        console.print(table)
    return {"open_loop": str(asked["open_loop"]), **result.to_json()}
