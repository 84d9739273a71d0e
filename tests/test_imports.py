"""Imports go one way: a room imports only rooms that stand before it, and some never meet at all."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "piston"
ROOMS = ["batch", "config", "demo", "data", "model", "weights", "train", "convert", "serve", "verify", "planning"]
ROOMS += ["cli"]
NEVER = {("model", "data"), ("model", "demo"), ("train", "demo"), ("verify", "demo"), ("config", "batch")}


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{a.name}" if node.module == "piston" else node.module for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {room_of(name) for name in names if name.startswith("piston.") and "__" not in name}
    return rooms


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    assert room in ROOMS, f"{relative}: add the room to the list in the order a sample travels"
    for other in imported_rooms(path):
        assert ROOMS.index(other) <= ROOMS.index(room), f"{relative} imports piston.{other}, which stands after it"
        assert (room, other) not in NEVER, f"{relative} imports piston.{other}; these rooms must not know each other"


def test_configuration_needs_no_torch() -> None:
    for path in (SOURCE / "config").glob("*.py"):
        assert "import torch" not in path.read_text(), f"{path.name} imports torch; configuration must load without it"


def test_the_model_does_not_know_it_is_distributed() -> None:
    for path in (SOURCE / "model").glob("*.py"):
        assert "torch.distributed" not in path.read_text(), f"{path.name} names torch.distributed"
