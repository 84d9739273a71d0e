"""The missing one of work, nodes, deadline and budget, from the others; impossible requests say what they need."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from piston.config.schema import require
from piston.planning import formulas
from piston.planning.request import Request

MOST_NODES = 4096
Rate = Callable[[int], float | int]  # nodes → samples per second


@dataclass(frozen=True)
class Answer:
    """Frames to see, on how many nodes, in how many days; and what was solved for."""

    frames: float | int
    nodes: int
    days: float | int
    solved: str
    how: str


def work_frames(request: Request, batch: int, corpus: float | int | None, recipe_steps: int) -> float | int | None:
    """The frames that the request asks for; None when they are to be solved for."""
    if request.timesteps is not None:
        return request.timesteps
    if request.epochs is not None:
        require(
            corpus is not None,
            f"--epochs is {request.epochs:g} but the corpus is unknown; an epoch needs a length: give --data or "
            "--hours",
        )
        assert corpus is not None
        return request.epochs * corpus
    if request.steps is not None:
        return float(request.steps * batch)
    open_ended = request.budget is not None or (request.days is not None and request.nodes is not None)
    return None if open_ended else float(recipe_steps * batch)


def solve(request: Request, frames: float | int | None, rate: Rate, gpus: int) -> Answer:
    """Fills in what is missing. Raises ValueError, with the least that is needed, when nothing can."""
    hours_bought = None if request.budget is None else request.budget / (request.price or 1.0)
    if frames is not None:
        return _for_work(request, frames, rate, gpus, hours_bought)
    nodes = request.nodes
    if nodes is None:
        nodes = 1
        if hours_bought is not None and request.days is not None:
            nodes = math.floor(hours_bought / (gpus * 24 * request.days))
            least = gpus * 24 * request.days * (request.price or 1.0)
            require(
                nodes >= 1,
                f"the budget {request.budget:g} does not pay one node of {gpus} GPUs for {request.days:g} days at "
                f"{request.price:g} per GPU-hour; it needs at least {least:,.0f}: raise --budget or shorten --days",
            )
    days = request.days if request.days is not None else math.inf
    if hours_bought is not None:
        days = min(days, hours_bought / (gpus * nodes) / 24)
    solved = "timesteps"
    return Answer(days * formulas.DAY * rate(nodes), nodes, days, solved, f"{nodes} nodes for {days:.2f} days")


def _for_work(request: Request, frames: float | int, rate: Rate, gpus: int, hours_bought: float | int | None) -> Answer:
    if request.nodes is None and request.days is not None:
        nodes = _nodes_for(frames, request.days, rate)
        solved, how = "nodes", f"the fewest that see the frames within {request.days:g} days"
    elif request.nodes is None and hours_bought is not None:
        nodes = 1
        while nodes < request.max_nodes and _gpu_hours(frames, rate, nodes + 1, gpus) <= hours_bought:
            nodes += 1
        solved, how = "days", f"the most nodes up to --max-nodes {request.max_nodes} that the budget pays"
    else:
        nodes, solved, how = request.nodes or 1, "days", "work / throughput"
    days = formulas.days(frames, rate(nodes))
    _check_budget(request, frames, rate, nodes, gpus, hours_bought)
    return Answer(frames, nodes, days, solved, how)


def _gpu_hours(frames: float | int, rate: Rate, nodes: int, gpus: int) -> float | int:
    return formulas.days(frames, rate(nodes)) * 24 * gpus * nodes


def _nodes_for(frames: float | int, days: float | int, rate: Rate) -> int:
    for nodes in range(1, MOST_NODES + 1):
        if formulas.days(frames, rate(nodes)) <= days:
            return nodes
    least = formulas.days(frames, rate(MOST_NODES))
    raise ValueError(
        f"--days {days:g} is too short for {frames:.3g} timesteps; even {MOST_NODES} nodes need at least {least:.3g} "
        "days: "
        "extend the deadline or reduce the work"
    )


def _check_budget(
    request: Request, frames: float | int, rate: Rate, nodes: int, gpus: int, hours_bought: float | int | None
) -> None:
    if hours_bought is None:
        return
    needed = _gpu_hours(frames, rate, nodes, gpus)
    price = request.price or 1.0
    require(
        needed <= hours_bought,
        f"--budget {request.budget:g} buys {hours_bought:,.0f} GPU-hours at {price:g}; this run on {nodes} node(s) "
        "needs at "
        f"least {needed:,.0f} GPU-hours, {needed * price:,.0f}: raise the budget, or reduce the work to "
        f"{frames * hours_bought / needed:.3g} timesteps",
    )
