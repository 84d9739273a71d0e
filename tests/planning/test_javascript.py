"""The page's formulas are the planner's: translated from one file, and equal on a grid of settings."""

import itertools
import json
import math
import shutil
import subprocess
from typing import Any

import pytest

from piston.planning import formulas
from piston.planning.case import base_numbers, choices, machine, payload, resolve
from piston.planning.gpus import CATALOGUE
from piston.planning.javascript import to_javascript
from piston.planning.page import formulas_script
from piston.planning.request import Request

NODE = shutil.which("node")


@pytest.mark.parametrize(
    "source",
    ["x = [i for i in y]", "def f(a):\n    while a:\n        a = 1", "def f(*a):\n    return a", "import os",
     "def f(a):\n    return a ** 2", "def f(a):\n    return a // 2", "def f(a):\n    return not a",
     "def f(a):\n    return True",
     "def f(a):\n    return a < 1 < 2"],
)  # fmt: skip
def test_what_the_languages_read_differently_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="formulas line"):
        to_javascript(source)


def grid() -> list[dict[str, Any]]:
    case = resolve(Request(subject="seed2", price=2.0))
    base = choices(case, anchored=True) | {"frames": 7e8}
    axes: dict[str, tuple[Any, ...]] = {
        "gpu": ("H200", "RTX 5090"),
        "sharding": ("none", "ddp", "zero1", "fsdp", "hsdp"),
        "checkpointing": ("none", "half", "full"),
        "kernels": ("eager", "xla"),
        "shape": ((1, 1, 64, 1, 24, 10), (8, 1, 2048, 3, 200, 50), (4, 3, 96, 2, 64, 16)),
    }
    result = []
    for i, values in enumerate(itertools.product(*axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        gpus, nodes, batch, cameras, text, horizon = chosen.pop("shape")
        shape = {"gpus": gpus, "nodes": nodes, "batch": batch, "cameras": cameras, "text": text, "horizon": horizon}
        odd = {
            "ema": i % 2,
            "precision": "float32" if i % 7 == 0 else "bfloat16",
            "unit": "single" if i % 3 == 0 else "block",
        }
        more = {"decode": 500.0 if i % 5 == 0 else 0.0, "usable": 40.0 if i % 4 == 0 else 0.0, "network": float(i % 3)}
        result.append(base | chosen | shape | odd | more)
    return result


def evaluated(costs: dict[str, Any], base: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    settings = formulas.configure(base, choice, machine(CATALOGUE[choice["gpu"]]))
    found = formulas.evaluate(costs, settings)
    found["node_rate"] = formulas.node_rate(costs["flops"], settings)
    found["days_on_4"] = formulas.days_on(found["node_rate"], choice["frames"], 4, 0.9)
    return found


def leaves(value: Any, path: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in leaves(inner, f"{path}/{name}").items()}
    return {path: float(value)}


@pytest.mark.skipif(NODE is None, reason="node is not installed; the grid runs the translated formulas in it")
def test_python_and_javascript_agree_on_a_grid() -> None:
    case = resolve(Request(subject="seed2", price=2.0))
    costs, base, cases = payload(case), base_numbers(case), grid()
    data = {"costs": costs, "base": base, "cases": cases, "gpus": {n: machine(g) for n, g in CATALOGUE.items()}}
    program = formulas_script() + (
        "const d = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "const out = d.cases.map((u) => {"
        "const s = configure(d.base, u, d.gpus[u.gpu]); const r = evaluate(d.costs, s);"
        "r.node_rate = node_rate(d.costs.flops, s); r.days_on_4 = days_on(r.node_rate, u.frames, 4, 0.9); return r; });"
        "process.stdout.write(JSON.stringify(out));"
    )
    assert NODE is not None
    done = subprocess.run([NODE, "-e", program], input=json.dumps(data), capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(cases) == 180
    for choice, other in zip(cases, theirs, strict=True):
        mine, found = leaves(evaluated(costs, base, choice)), leaves(other)
        assert mine.keys() == found.keys()
        for name, value in mine.items():
            assert math.isclose(value, found[name], rel_tol=1e-12, abs_tol=1e-9), (name, choice)


def test_the_grid_is_not_constant() -> None:
    case = resolve(Request(subject="seed2", price=2.0))
    costs, base = payload(case), base_numbers(case)
    peaks = {evaluated(costs, base, choice)["memory"]["peak"] for choice in grid()[:60]}
    assert len(peaks) > 30
