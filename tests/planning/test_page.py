"""The page stands alone, holds the whole report, and in a real browser shows Python's numbers wherever sliders go."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Browser, browser

from piston.planning import formulas
from piston.planning.case import base_numbers, choices, machine
from piston.planning.gpus import CATALOGUE
from piston.planning.page import data, page
from piston.planning.plan import Plan, make_plan
from piston.planning.request import Request


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Request(subject="seed2", price=2.5))


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return page(plan)


def test_it_is_one_file_without_network(text: str) -> None:
    without_credit = text.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
    assert not re.search(
        r"""(src|href)\s*=\s*["']?https?:|@import|url\(https?:|fetch\(|XMLHttpRequest""", without_credit
    )
    assert "default-src 'none'" in text
    assert len(text.encode()) < 2e6


def test_nothing_is_left_unfilled(text: str) -> None:
    assert not re.search(r"@[A-Z]+@", text)
    assert "NaN" not in text.split("const DATA = ")[1].split(";\n")[0]


def test_it_holds_every_section_with_its_kinds(plan: Plan, text: str) -> None:
    for section in plan.sections:
        assert f'id="section-{section.key}"' in text
    for word in ("not reported", "does not follow", 'title="quoted: arXiv:2406.09246"'):
        assert word in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    anchors = tmp_path / "<script>alert(1).json"
    anchors.write_text(
        '{"schema": "piston.anchors/1", "gpu": "H200", "gpus": 8, "cameras": 3, "text": 200, "horizon": 50,'
        '"points": [{"batch": 64, "wall_s": 0.48, "compute_s": 0.23}]}'
    )
    found = page(make_plan(Request(anchors=anchors)))
    assert "&lt;script&gt;alert(1)" in found
    assert found.count("<script>") == 2  # the library and ours


def test_the_profile_that_the_plan_used_comes_first(plan: Plan) -> None:
    found = data(plan)["profiles"]
    assert [p["name"] for p in found] == ["anchors", "published"]
    assert data(make_plan(Request()))["profiles"][0]["name"] == "published"
    assert data(make_plan(Request(efficiency=0.4)))["profiles"][0]["name"] == "your efficiency"


needs_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, text: str) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "plan.html"
    path.write_text(text, encoding="utf-8")
    with browser(folder / "profile") as session:
        session.resize(1400, 1000)
        session.open(path)
        yield session


SET = """
const input = document.getElementById(arguments[0]);
if (input.type === "checkbox") input.checked = arguments[1];
else if (rule(arguments[0]).values) input.value = rule(arguments[0]).values.indexOf(arguments[1]);
else input.value = arguments[1];
input.dispatchEvent(new Event("input", { bubbles: true }));
"""
CARDS = (
    "return Object.fromEntries([...document.querySelectorAll('.card')].map((c) => [c.id.slice(5), c.dataset.value]));"
)


def expected(plan: Plan, gpu: str, efficiency: float, **choose: Any) -> dict[str, float]:
    """The cards as Python computes them."""
    chosen = choices(plan.case, anchored=True) | {"frames": plan.answer.frames} | choose
    chosen["batch"] = chosen.pop("per_gpu", 256) * chosen["gpus"] * chosen["nodes"]
    chosen["hfu"] = efficiency
    settings = formulas.configure(base_numbers(plan.case), chosen, machine(CATALOGUE[gpu]))
    found = formulas.evaluate(plan.costs, settings)
    nodes = chosen["nodes"]
    rate = formulas.node_rate(plan.costs["flops"], settings) * nodes * (plan.bands.scaling[1] if nodes > 1 else 1)
    days = formulas.days(chosen["frames"], rate)
    return {
        "rate": rate, "step": found["stages"]["step"], "days": days, "peak": found["memory"]["peak"] / 1e9,
        "largest": found["largest"], "flops": found["model_flops"] / 1e12,
        "gpu-hours": days * 24 * chosen["gpus"] * nodes, "cost": days * 24 * chosen["gpus"] * nodes * chosen["price"],
    }  # fmt: skip


MOVES: list[dict[str, Any]] = [
    {},
    {"per_gpu": 64, "nodes": 4},
    {"gpu": "A100", "cameras": 2, "text": 64, "horizon": 10, "checkpointing": "none", "kernels": "compiled"},
    {"gpu": "B200", "precision": "float32", "ema": True, "sharding": "fsdp", "gpus": 4, "price": 4.0},
    {"gpus": 16, "nodes": 8, "sharding": "hsdp", "checkpointing": "half", "kernels": "eager", "frames": 903.0},
]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("moves", MOVES, ids=str)
def test_sliders_show_pythons_numbers(opened: Browser, plan: Plan, moves: dict[str, Any]) -> None:
    opened.run("document.getElementById('reset').click();")
    for name, value in moves.items():
        opened.run(SET, name, value)
    choose = {k: v for k, v in moves.items() if k not in ("gpu", "frames", "ema")}
    if "frames" in moves:
        choose["frames"] = moves["frames"] * 1e6
    if "ema" in moves:
        choose["ema"] = int(moves["ema"])
    assert plan.case.anchored is not None
    mine = expected(plan, moves.get("gpu", "H200"), float(plan.case.anchored.value), **choose)
    shown = opened.run(CARDS)
    for name, value in mine.items():
        assert math.isclose(float(shown[name]), value, rel_tol=1e-9), (name, shown[name], value)
    assert [m for m in opened.messages() if "favicon" not in m] == []


@pytest.mark.slow
@needs_browser
def test_keyboard_moves_a_slider_and_everything_follows(opened: Browser) -> None:
    opened.run("document.getElementById('reset').click();")
    before = opened.run(CARDS)
    caption = "return document.getElementById('days-caption').textContent;"
    text = opened.run(caption)
    opened.press("nodes", "\ue014\ue014\ue014")  # arrow right, three times
    after = opened.run(CARDS)
    assert opened.run("return document.getElementById('nodes').value;") == "4"
    assert float(after["days"]) < float(before["days"]) / 3
    assert opened.run(caption) == text  # the curve over nodes starts where it did
    opened.press("cameras", "\ue012")
    assert float(opened.run(CARDS)["flops"]) < float(before["flops"])
    assert opened.run(caption) != text
    unlabelled = "return [...document.querySelectorAll('input,select')].filter((e) => !e.labels.length).length;"
    assert opened.run(unlabelled) == 0


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "height", "scheme"), [(1400, 1800, "light"), (390, 2200, "dark")])
def test_it_fits_wide_and_narrow_windows_light_and_dark(
    opened: Browser, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    opened.run("document.getElementById('reset').click();")
    opened.resize(width, height)
    opened.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    opened.run("update();")
    assert opened.run("return document.documentElement.scrollWidth;") <= width
    ground = opened.run("return getComputedStyle(document.body).backgroundColor;")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == (scheme == "dark")
    canvases = opened.run("return [...document.querySelectorAll('canvas')].map((c) => c.clientWidth);")
    assert len(canvases) == 4
    assert all(0 < w <= width for w in canvases)
    assert opened.run("return performance.getEntriesByType('resource').length;") == 0
    shot = Path(os.environ.get("PISTON_SCREENSHOTS", str(tmp_path))) / f"plan-{width}-{scheme}.png"
    opened.screenshot(shot)
    assert shot.stat().st_size > 20_000
