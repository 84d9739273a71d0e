"""scripts/mutation_check.py: verification notices every known porting mistake, and nothing where there is none."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from piston.verify.bundle import open_bundle

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutation_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation_check"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_bfloat16_forward_pass_is_the_references_to_the_bit(golden: Path, check: ModuleType) -> None:
    (model_set,) = (s for s in open_bundle(golden).models if s.name == "tiny_pi0")
    rows = {row.name: row for row in check.bit_rows(model_set)}
    assert all(row.ok for row in rows.values())
    assert rows["siglip/block01_out"].error == 0
    assert rows["kv_v (suffix)"].error < 0.02


def test_a_mistake_is_undone_again(golden: Path, check: ModuleType) -> None:
    bundle = open_bundle(golden)
    mistake = next(m for m in check.MISTAKES if m.where == "units")
    with check.made(mistake):
        assert not all(row.ok for row in check.rows_of(bundle, mistake))
    assert all(row.ok for row in check.rows_of(bundle, mistake))


@pytest.mark.slow
def test_every_mistake_is_noticed(golden: Path, check: ModuleType) -> None:
    bundle = open_bundle(golden)
    missed = []
    for mistake in check.MISTAKES:
        with check.made(mistake):
            rows = check.rows_of(bundle, mistake)
        if rows and all(row.ok for row in rows):
            missed.append(mistake.name)
    assert len(check.MISTAKES) >= 65
    assert not missed
