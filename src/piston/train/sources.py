"""What a run reads: data set, split by episode, statistics, tokenizer; opened once, hashed, copied into checkpoints."""

import dataclasses
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path

import numpy as np

from piston.batch import Batch
from piston.config.schema import SHIPPED_TOKENIZER, RunConfig
from piston.data.cache import attach
from piston.data.lerobot import Dataset, open_dataset
from piston.data.loader import Inputs, Loader
from piston.data.norm import load_for_run, norm_stats_path
from piston.data.order import split_episodes
from piston.data.prompt import load_tokenizer
from piston.data.transforms import input_transform
from piston.train.checkpoint import NORM_STATS, Checkpoint, digest


@dataclass(frozen=True)
class Sources:
    """Training and held-out episodes, the inputs transform, and the files a checkpoint carries to be served alone."""

    run: RunConfig
    train: Dataset
    validation: Dataset | None
    inputs: Inputs
    files: dict[str, bytes]
    identity: dict[str, str]  # hashes of what the configuration only points to
    _validation_batches: list[Batch] = field(default_factory=list)

    def loader(self, *, start: int, pin: bool) -> Loader:
        """Training batches from sample number `start` on."""
        return Loader(self.run, self.train, self.inputs, start=start, pin=pin)

    def validation_batches(self) -> list[Batch]:
        """The first `validation_batches` batches of the held-out episodes; decoded once, then kept in memory."""
        if not self._validation_batches:
            assert self.validation is not None, "no episodes are held out"
            with Loader(self.run, self.validation, self.inputs, train=False) as loader:
                self._validation_batches.extend(islice(loader, self.run.train.validation_batches))
        return self._validation_batches

    def describe(self) -> str:
        held_out = f", {self.validation.num_episodes} held out" if self.validation is not None else ""
        cache = f"; cached frames, {self.train.cache.describe()}" if self.train.cache is not None else ""
        return f"{self.train.num_frames:,} frames in {self.train.num_episodes} episodes{held_out}{cache}"


def open_sources(run: RunConfig, resumed: Checkpoint | None) -> Sources:
    """Opens and checks everything. Statistics and tokenizer that are gone are taken from the checkpoint.

    Raises ValueError, saying what to do, for anything missing, damaged, or unfit for the robot.
    """
    run = _with_saved_files(run, resumed)
    ds, robot = attach(open_run_dataset(run), run.data.cache, run.model.image_size), run.data.robot
    frames = None if ds.cache is None else ds.cache.lossy_content
    inputs = input_transform(run, load_for_run(run), load_tokenizer(run.data.tokenizer))
    tokenizer, stats = _tokenizer_bytes(run.data.tokenizer), norm_stats_path(run).read_bytes()
    train, held_out = split_episodes(run.train.seed, ds.num_episodes, run.data.validation_fraction)
    numbers = [ds.column(key) for key in (*robot.state_keys, robot.action_key)]
    return Sources(
        run,
        ds.select(train),
        ds.select(held_out) if len(held_out) else None,
        inputs,
        files={NORM_STATS: stats, "tokenizer.json" if tokenizer[:1] == b"{" else "tokenizer.model": tokenizer},
        identity={
            "data set": digest(ds.episode_index, ds.episode_starts, np.array([ds.fps]), *numbers),
            "norm statistics": digest(stats),
            "tokenizer": digest(tokenizer),
            **({} if frames is None else {"cached frames (data.cache)": frames}),
        },
    )


def open_run_dataset(run: RunConfig) -> Dataset:
    """The run's data set, with the columns and cameras of its robot."""
    data, robot = run.data, run.data.robot
    if data.root is None:
        raise ValueError(
            f"recipe {run.name} has no data set (data.root is None); expected a LeRobot directory of {data.repo_id} or "
            "one like it: pass --data.root PATH"
        )
    return open_dataset(
        data.root,
        tolerance_s=data.tolerance_s,
        bad_episodes=data.bad_episodes,
        columns=(*robot.state_keys, robot.action_key),
        cameras=tuple(robot.cameras.values()),
    )


def _with_saved_files(run: RunConfig, resumed: Checkpoint | None) -> RunConfig:
    """The run with paths into the checkpoint instead of statistics and tokenizer files that are no longer there."""
    if resumed is None:
        return run
    data = run.data
    if not norm_stats_path(run).exists():
        data = dataclasses.replace(data, norm_stats=resumed.path / NORM_STATS)
    if data.tokenizer is None or not (data.tokenizer == SHIPPED_TOKENIZER or data.tokenizer.exists()):
        data = dataclasses.replace(data, tokenizer=next(resumed.path.glob("tokenizer.*"), data.tokenizer))
    return dataclasses.replace(run, data=data)


def _tokenizer_bytes(path: Path | None) -> bytes:
    assert path is not None, "load_tokenizer has refused it"
    if path == SHIPPED_TOKENIZER:
        return (resources.files("piston") / "assets" / "small.model").read_bytes()
    return path.read_bytes()
