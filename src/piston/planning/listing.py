"""The recipes as one table: what each trains, on what, for how long, from which weights, in how much memory."""

from pathlib import Path

from rich.table import Table

from piston.config.recipes import ORIGINS, recipe, recipe_names
from piston.config.schema import OptimConfig
from piston.planning.case import payload, resolve
from piston.planning.memory import GB, usage
from piston.planning.request import Request


def recipes_table() -> tuple[Table, list[str]]:
    """The table, and the lines below it: what the columns mean, and what differs from openpi."""
    names = ("recipe", "model", "horizon", "data set", "robot", "batch", "steps", "learning rate", "EMA", "start", "GB")
    table = Table(*names)
    for column in table.columns:
        column.overflow = "fold"
    differing: dict[str, list[str]] = {}
    for name in recipe_names():
        run, origin = recipe(name), ORIGINS.get(name)
        model = ("π0.5" if run.model.pi05 else "π0") + (" LoRA" if run.model.paligemma.lora_attn else "")
        start = "-" if origin is None or origin.start is None else _checkpoint_name(origin.start)
        table.add_row(
            name, model, str(run.model.action_horizon), run.data.repo_id, run.data.robot.name,
            str(run.train.batch_size), str(run.train.num_train_steps), _schedule(run.optim),
            "none" if run.optim.ema_decay is None else f"{run.optim.ema_decay:g}", start, _memory(name),
        )  # fmt: skip
        if origin is not None and origin.differs:
            differing.setdefault(origin.differs, []).append(name)
    notes = [
        "GB: one GPU, predicted: a micro-batch of one sample … of the whole batch, with full checkpointing "
        "(`piston plan NAME` for more).",
        "start: openpi's checkpoint, given with --train.init (docs/convert.md); -: none.",
        *(f"{', '.join(named)}: {what}." for what, named in differing.items()),
    ]
    return table, notes


def _checkpoint_name(start: str) -> str:
    """pi05_base of …/pi05_base/params, debug of …/debug/9/params."""
    return next(part for part in reversed(Path(start).parts[:-1]) if not part.isdigit())


def _schedule(optim: OptimConfig) -> str:
    if optim.schedule == "rsqrt":
        return f"{optim.peak_lr:g} after {optim.warmup_steps}, then 1/√"
    if optim.peak_lr == optim.decay_lr:
        return f"{optim.peak_lr:g} after {optim.warmup_steps}"
    return f"{optim.peak_lr:g} after {optim.warmup_steps}, {optim.decay_lr:g} at {optim.decay_steps}"


def _memory(name: str) -> str:
    case = resolve(Request(subject=name, gpus=1))
    costs = payload(case)
    low, high = (usage(case, costs, samples=samples)["peak"] / GB for samples in (1, case.per_gpu))
    return f"{low:.3g} … {high:.3g}"
