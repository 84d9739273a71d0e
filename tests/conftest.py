"""Shared fixtures. Golden files are recorded from openpi's JAX code: they are read here and never written."""

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors: one thread is faster, and parallel test workers do not fight for cores."""
    torch.set_num_threads(1)
