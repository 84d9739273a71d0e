"""argv → command → frozen configuration. A room is imported only when its command runs.

Commands are fixed names; a recipe's options are the fields of RunConfig. Exit code 0 means success, 1 a finished
command with a bad result (a difference, a damaged data set), 2 a mistake in the call or its inputs.
"""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape

from piston.config.schema import RunConfig

Args = list[str]


def _recipe_run(args: Args, prog: str, what: str) -> RunConfig:
    """The run of `RECIPE [options]` or `--from run.json [options]`; RECIPE is a name or a Python file."""
    from piston.config.recipes import recipe, recipe_names

    if not args or args[0] in ("-h", "--help"):
        out = Console()
        out.print(f"[bold]{prog} RECIPE \\[options][/]   {what}")
        out.print(f"[bold]{prog} --from RUN.JSON \\[options][/]   repeats a recorded run")
        out.print(f"\nRecipes: {', '.join(recipe_names())}; or a Python file that sets RECIPE")
        out.print(f"\n{prog} RECIPE --help lists every option with the recipe's own values.")
        raise SystemExit(0)
    if args[0] == "--from":
        from piston.config.serialize import from_json

        if len(args) < 2:
            raise ValueError("--from needs the path of a run.json, as written into every run's directory")
        default, rest = from_json(_read(Path(args[1]))), args[2:]
    elif args[0].startswith("-"):
        raise ValueError(f"the first argument is {args[0]!r}, expected a recipe; one of: {', '.join(recipe_names())}")
    else:
        default, rest = recipe(args[0]), args[1:]
    return tyro.cli(
        tyro.conf.configure(tyro.conf.AvoidSubcommands)(RunConfig), default=default, args=rest, prog=f"{prog} {args[0]}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give --from the path of a run.json") from error


def train(args: Args) -> int:
    """train RECIPE [options]: train π0 or π0.5 on a LeRobot data set."""
    run = _recipe_run(args, "piston train", "train on a LeRobot data set")
    from piston.config.recipes import ORIGINS
    from piston.train.loop import train as run_training

    origin = ORIGINS.get(run.name)
    if origin is not None and origin.start is not None and run.train.init is None and not run.train.resume:
        Console().print(
            f"{run.name} of openpi starts from {origin.start}; without --train.init PATH this run starts from nothing",
            highlight=False,
            soft_wrap=True,
        )
    return run_training(run).exit_code


def recipes(args: Args) -> int:
    """recipes: every recipe with its data set, batch, schedule, memory, and the weights it starts from."""

    def listing() -> None:
        """Lists the recipes; `piston train NAME --help` shows all values of one."""

    tyro.cli(listing, args=args, prog="piston recipes")
    from piston.planning.listing import recipes_table

    table, notes = recipes_table()
    console = _wide_console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    return 0


def _wide_console() -> Console:
    """The terminal; or, for a file or a pipe, which have no width, one on which nothing is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)


Layer = Literal["forward", "gradient", "curve"]


def _verify_bundle(layer: Layer, args: Args) -> int:
    def options(
        bundle: Path,
        device: str = "cpu",
        json: Path | None = None,
    ) -> tuple[Path, str, Path | None]:
        """Compares Piston with a golden bundle, array by array; exit code 1 if anything differs.

        Args:
            bundle: a directory with MANIFEST.json and arrays recorded from openpi's JAX code (tests/golden is one).
            device: where Piston computes; the bundle's numbers come from a CPU.
            json: also write every row to this file ("-" for standard output instead of the table).
        """
        return bundle, device, json

    root, device, json = tyro.cli(options, args=args, prog=f"piston verify {layer}")
    from piston.train.loop import find_device
    from piston.verify.bundle import open_bundle
    from piston.verify.curve import verify_curve
    from piston.verify.forward import verify_forward
    from piston.verify.gradient import verify_gradient
    from piston.verify.report import render

    console = Console()
    compare = {"forward": verify_forward, "gradient": verify_gradient, "curve": verify_curve}[layer]
    with console.status(f"{layer}: comparing with {root}"):
        report = compare(open_bundle(root), str(find_device(device)))
    if json is None or str(json) != "-":
        render(report, console)
    if json is not None:
        _write_json(json, report.to_json())
    return 0 if report.ok else 1


def _write_json(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text + "\n")
    else:
        path.write_text(text + "\n")


def verify_forward(args: Args) -> int:
    """verify forward --bundle DIR: every intermediate of the forward pass and of sampling, against openpi's JAX."""
    return _verify_bundle("forward", args)


def verify_gradient(args: Args) -> int:
    """verify gradient --bundle DIR: the gradient of every parameter, against openpi's JAX."""
    return _verify_bundle("gradient", args)


def verify_curve(args: Args) -> int:
    """verify curve --bundle DIR: a recorded training run replayed step by step, against openpi's JAX."""
    return _verify_bundle("curve", args)


def verify_all(args: Args) -> int:
    """verify all [--json OUT]: every layer on every bundle, one table of worst errors, one verdict."""
    from piston.verify.every import all_command

    return all_command(args, "piston verify all", _wide_console())


def verify_live(args: Args) -> int:
    """verify live [--record DIR]: openpi's JAX code run now, in its own venv (`make live`), on fresh architectures."""
    from piston.verify.live import live_command

    return live_command(args, "piston verify live", Console())


def data_info(args: Args) -> int:
    """data info PATH: what a LeRobot data set holds."""

    def options(path: tyro.conf.Positional[Path], json: bool = False) -> tuple[Path, bool]:
        """Version, robot, cameras, features, episodes, hours and bytes of a LeRobot v2.0, v2.1 or v3.0 directory.

        Args:
            path: the data set's directory (the one that holds meta/).
            json: print JSON instead of tables.
        """
        return path, json

    path, as_json = tyro.cli(options, args=args, prog="piston data info")
    from piston.data.doctor import info_command

    return info_command(path, as_json, _wide_console())


def data_check(args: Args) -> int:
    """data check PATH: what is wrong with a data set, before it costs a run."""

    def options(
        path: tyro.conf.Positional[Path],
        json: bool = False,
        horizon: int | None = None,
        recipe: str | None = None,
        fast: bool = False,
    ) -> int:
        """Everything that would stop or spoil a run: files, videos, timestamps, values, statistics. Exit 1 on errors.

        Args:
            path: the data set's directory (the one that holds meta/).
            json: print JSON instead of a table.
            horizon: action horizon, for the share of steps repeated at episode ends; by default the recipe's, or 50.
            recipe: judge for this recipe: its deltas, action horizon and token budget.
            fast: decode no frame.
        """
        run = None if recipe is None else find(recipe)
        steps = (50 if run is None else run.model.action_horizon) if horizon is None else horizon
        return check_command(path, json, steps, _wide_console(), decode=not fast, run=run)

    from piston.config.recipes import recipe as find
    from piston.data.doctor import check_command

    return tyro.cli(options, args=args, prog="piston data check")


def data_stats(args: Args) -> int:
    """data stats PATH --recipe NAME: normalisation statistics, equal to openpi's."""

    def options(
        path: tyro.conf.Positional[Path],
        recipe: str,
        out: Path | None = None,
        max_frames: int | None = None,
    ) -> tuple[Path, str, Path | None, int | None]:
        """Mean, std, q01 and q99 of state and actions, from the tables alone, written as openpi's norm_stats.json.

        Args:
            path: the data set's directory (the one that holds meta/).
            recipe: the recipe whose robot transforms and action horizon the statistics belong to.
            out: where to write; by default where training looks, assets/RECIPE/REPO_ID/norm_stats.json.
            max_frames: use a random subset of this many frames, as openpi's script does.
        """
        return path, recipe, out, max_frames

    path, name, out, max_frames = tyro.cli(options, args=args, prog="piston data stats")
    from piston.config.recipes import recipe as find
    from piston.data.stats import stats_command

    return stats_command(path, find(name), out, max_frames, Console())


def data_demo(args: Args) -> int:
    """data demo PATH: records the planar-arm demo data set."""

    def options(path: tyro.conf.Positional[Path], episodes: int = 700, seed: int = 0) -> tuple[Path, int, int]:
        """Records a small LeRobot v3.0 data set (h264 video, two cameras) from a simulated arm and a scripted expert.

        Args:
            path: the directory to write; one that holds the same recording is kept.
            episodes: how many episodes.
            seed: of scenes and tasks.
        """
        return path, episodes, seed

    path, episodes, seed = tyro.cli(options, args=args, prog="piston data demo")
    from rich.progress import Progress

    from piston.demo.record import DemoConfig, build

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("recording", total=episodes)
        recorded = build(
            path,
            DemoConfig(episodes=episodes, seed=seed),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"{'recorded' if recorded else 'kept, as it was recorded the same way:'} {path}, {episodes} episodes")
    return 0


def data_cache(args: Args) -> int:
    """data cache PATH [--recipe NAME]: frames at model resolution, so that training never waits for video."""
    from piston.data.cache_build import Order, Part, cache_command

    def options(
        path: tyro.conf.Positional[Path],
        recipe: str | None = None,
        out: Path | None = None,
        quality: Literal["q80-420", "q90-444", "q95-444", "lossless"] | None = None,
        shard: str = "1/1",
        workers: int | None = None,
        bad_episodes: Literal["fail", "skip"] = "fail",
        merge: bool = False,
        check: bool = False,
    ) -> int:
        """Decodes and resizes every frame once. Stopped or killed, the same command goes on where it was.

        Args:
            path: the data set's directory (the one that holds meta/).
            recipe: cache the cameras and image size of this recipe; by default all cameras at 224×224.
            out: where to write; by default where training looks, PATH/.piston-cache/SIZE.
            quality: JPEG quality and chroma, or exact pixels; by default q90-444. q80-420 is the smallest.
            shard: the i-th of n parts, for n machines that write to one directory or whose files are copied together.
            workers: processes; by default one per core.
            bad_episodes: stop at episodes with errors, or leave them out.
            merge: only verify the shard files that are there and finish the cache.
            check: only verify a finished cache: hashes, sources, sampled frames; exit code 1 if anything is wrong.
        """
        if merge and check:
            raise ValueError("--merge and --check are both given, expected one of them: merge first, then check")
        if workers is not None and workers < 1:
            raise ValueError(f"--workers is {workers}, expected at least 1: leave it out for one per core")
        run = None if recipe is None else find(recipe)
        order = Order(
            path=path,
            directory=out,
            image_size=None if run is None else run.model.image_size,
            cameras=None if run is None else tuple(run.data.robot.cameras.values()),
            coding=quality,
            part=Part.parse(shard),
            workers=len(os.sched_getaffinity(0)) if workers is None else workers,
            bad_episodes=bad_episodes,
            tolerance_s=(run or RunConfig("cache")).data.tolerance_s,
        )
        return cache_command(order, "merge" if merge else "check" if check else "build", Console())

    from piston.config.recipes import recipe as find

    return tyro.cli(options, args=args, prog="piston data cache")


def evaluate(args: Args) -> int:
    """eval CKPT: closed-loop success in the simulator, or open-loop error on a data set."""
    from piston.serve.evaluate import evaluate_command

    return evaluate_command(args, "piston eval", Console())


def convert(args: Args) -> int:
    """convert SRC DST --to LAYOUT: weights from and to openpi (JAX, PyTorch), LeRobot and Piston."""
    from piston.convert.convert import Dtype, Target, convert_command, find_run
    from piston.convert.extras import Given

    def options(
        source: tyro.conf.Positional[Path],
        target: tyro.conf.Positional[Path],
        to: Target,
        dtype: Dtype | None = None,
        raw: bool = False,
        merge_lora: bool = False,
        recipe: str | None = None,
        norm_stats: Path | None = None,
        tokenizer: Path | None = None,
        asset_id: str | None = None,
    ) -> int:
        """Converts a checkpoint exactly, whole or not at all. What it is, is read from its files.

        Args:
            source: openpi JAX or PyTorch, LeRobot, RLinf or Piston: a directory or a .safetensors file.
            target: the directory to write; it must not exist.
            to: the layout to write.
            dtype: store every tensor in this dtype; by default each keeps its own.
            raw: take the last weights of a Piston checkpoint, not their EMA.
            merge_lora: fold LoRA adapters into the weights, for layouts that have no place for them.
            recipe: a recipe or run.json, for what the files do not tell: robot, horizon, prompt length.
            norm_stats: statistics to put in place of the checkpoint's own.
            tokenizer: a tokenizer file to put into a Piston checkpoint.
            asset_id: which of openpi's statistics to read, and under which name to write them.
        """
        given = Given(None if recipe is None else find_run(recipe), norm_stats, tokenizer, asset_id)
        return convert_command(source, target, to, dtype, raw, merge_lora, given, Console())

    return tyro.cli(options, args=args, prog="piston convert")


def migrate(args: Args) -> int:
    """migrate PATH: a training configuration of openpi or LeRobot as a Piston recipe file."""

    def options(path: tyro.conf.Positional[Path], name: str | None = None, out: Path | None = None) -> int:
        """Reads a configuration, running none of its code, and writes a recipe; says what it could not carry.

        Args:
            path: openpi's Python file with TrainConfig(…), or LeRobot's train_config.json.
            name: which of the file's configurations.
            out: the file to write; by default NAME.py here.
        """
        from piston.convert.migrate import migrate_command

        return migrate_command(path, name, out, Console())

    return tyro.cli(options, args=args, prog="piston migrate")


def plan(args: Args) -> int:
    """plan [RECIPE|seed2] [options]: time, memory, data, cost and bottleneck of a run, before it starts."""
    from piston.planning.command import plan_command

    return plan_command(args, "piston plan", Console())


def plan_backtest(args: Args) -> int:
    """plan backtest: the planner's error against everything published, and against your own profiles."""
    from piston.planning.command import backtest_command

    return backtest_command(args, "piston plan backtest", Console())


COMMANDS: dict[str, Callable[[Args], int]] = {
    "train": train,
    "recipes": recipes,
    "verify forward": verify_forward,
    "verify gradient": verify_gradient,
    "verify curve": verify_curve,
    "verify all": verify_all,
    "verify live": verify_live,
    "data info": data_info,
    "data check": data_check,
    "data stats": data_stats,
    "data cache": data_cache,
    "data demo": data_demo,
    "convert": convert,
    "migrate": migrate,
    "plan": plan,
    "plan backtest": plan_backtest,
    "eval": evaluate,
}


def usage(console: Console, group: str = "") -> None:
    """The commands (of one group), a line each."""
    console.print("[bold]piston[/]: train π0 and π0.5 in PyTorch, equal to openpi's JAX reference\n")
    for name, command in COMMANDS.items():
        if name.startswith(group):
            call, _, what = (command.__doc__ or "").partition(": ")
            console.print(f"  [bold]piston {escape(call)}[/]\n      {escape(what)}")
    console.print("\nEvery command explains itself with --help.")


def find_command(argv: Args) -> tuple[str, Args]:
    """The command that argv names and its arguments; an unknown one raises, naming the nearest."""
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, argv[length:]
    asked = " ".join(argv[:2]) if any(n.startswith(argv[0] + " ") for n in COMMANDS) else argv[0]
    near = difflib.get_close_matches(asked, [*COMMANDS, *{n.split()[0] for n in COMMANDS}], n=1, cutoff=0.4)
    hint = f"; did you mean `piston {near[0]}`?" if near else ""
    raise ValueError(f"unknown command `piston {asked}`{hint} The commands are: {', '.join(COMMANDS)}")


def main(argv: Args | None = None) -> None:
    """Runs one command and exits with its code."""
    # Read when torch is loaded. Idle threads that spin take cores from loader processes and everything else: the demo's
    # training on two cores with other jobs beside it (load 5) made 27 samples/s spinning, 333 not.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    argv = sys.argv[1:] if argv is None else argv
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    if not argv or argv[0] in ("-h", "--help"):
        usage(Console())
        sys.exit(0)
    if argv[0] in groups - COMMANDS.keys() and argv[1:2] in ([], ["-h"], ["--help"]):
        usage(Console(), argv[0])
        sys.exit(0)
    if argv[0] == "--version":
        from piston import __version__

        sys.stdout.write(f"piston {__version__}\n")
        sys.exit(0)
    try:
        name, args = find_command(argv)
        code = COMMANDS[name](args)
    except ValueError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        code = 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        what = f"{error.strerror or error}{where}; check the path, its permissions and the disk's free space"
        Console(stderr=True).print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True)
        code = 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
