"""What backward keeps is what autograd's own hooks see on the real model, and what the notes measured elsewhere."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from piston.batch import Observation
from piston.config.recipes import PI05
from piston.config.schema import GemmaConfig, ModelConfig, SiglipConfig
from piston.model.cost import total_parameters
from piston.model.flow import flow_loss
from piston.model.pi0 import Pi0
from piston.planning.activations import units
from piston.planning.coefficients import reshaped
from piston.planning.trace import attention_as_on_a_gpu

GIB = 2**30
VLM = GemmaConfig(width=128, depth=3, mlp_dim=320, num_heads=4, num_kv_heads=1, head_dim=32)
SMALL = ModelConfig(
    pi05=True,
    paligemma=VLM,
    action_expert=dataclasses.replace(VLM, width=96, mlp_dim=288),
    siglip=SiglipConfig(width=96, depth=3, mlp_dim=224, num_heads=3),
    vocab_size=100,
    image_size=(56, 56),
    action_dim=8,
    action_horizon=10,
    max_token_len=28,
)


class Box:
    """A saved tensor; alive as long as the graph holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_by_autograd(config: ModelConfig, batch: int) -> int:
    """Bytes of all storages that the graph of one loss keeps, parameters left out."""
    model = Pi0.build(config, device="cpu", seed=0)
    cameras, (height, width) = len(config.cameras), config.image_size
    observation = Observation(
        torch.zeros(batch, cameras, height, width, 3),
        torch.ones(batch, cameras, dtype=torch.bool),
        torch.zeros(batch, config.action_dim),
        torch.zeros(batch, config.max_token_len, dtype=torch.int32),
        torch.ones(batch, config.max_token_len, dtype=torch.bool),
    )
    actions = torch.zeros(batch, config.action_horizon, config.action_dim)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    boxes: weakref.WeakSet[Box] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Box:
        box = Box(tensor)
        boxes.add(box)
        return box

    with attention_as_on_a_gpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        loss = flow_loss(model, observation, actions, actions, torch.full((batch,), 0.5)).mean()
    storages = {b.tensor.untyped_storage().data_ptr(): b.tensor.untyped_storage().nbytes() for b in boxes}
    assert loss.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in own)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pi05", [True, False])
def test_eager_bytes_are_what_autograd_keeps(dtype: Any, pi05: bool) -> None:
    config = dataclasses.replace(SMALL, dtype=dtype, pi05=pi05)
    two, four = kept_by_autograd(config, 2), kept_by_autograd(config, 4)
    per_sample = (four - two) / 2
    fixed = two - 2 * per_sample
    assert sum(u.count * u.eager for u in units(config)) == pytest.approx(per_sample, rel=0.01)
    assert sum(u.count * u.casts for u in units(config)) == pytest.approx(fixed, rel=0.01, abs=8000)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, pi05=False), PI05])
def test_units_hold_every_parameter(config: ModelConfig) -> None:
    assert sum(u.count * u.parameters for u in units(config)) == total_parameters(config)


def test_blocks_have_the_models_own_parameters() -> None:
    model = Pi0.on_meta(SMALL)
    sizes = {u.name: u.parameters for u in units(SMALL)}
    assert sizes["joint blocks"] == sum(p.numel() for p in model.gemma.blocks[0].parameters())
    assert sizes["vision blocks"] == sum(p.numel() for p in model.siglip.blocks[0].parameters())


def test_compiled_bytes_are_what_the_min_cut_partitioner_kept() -> None:
    """87.9 MiB per joint layer and 2.03 GiB per sample at 2/200/50: feasibility notes, 2026."""
    found = {u.name: u for u in units(reshaped(PI05, 2, 200, 50))}
    assert found["joint blocks"].compiled / 2**20 == pytest.approx(87.9, rel=0.01)
    assert sum(u.count * u.compiled for u in found.values()) / GIB == pytest.approx(2.03, rel=0.02)


def test_stock_bytes_are_near_an_eager_port() -> None:
    """2.80 GiB per sample at 2/200/50 for a port on PyTorch's fused operations: feasibility notes, 2026."""
    total = sum(u.count * u.stock for u in units(reshaped(PI05, 2, 200, 50)))
    assert total / GIB == pytest.approx(2.80, rel=0.06)


def test_checkpointing_keeps_the_streams() -> None:
    """0.105 GB per sample: the slope that the notes traced at 2/200/50 with full checkpointing."""
    total = sum(u.count * (u.inputs if "block" in u.name else u.eager) for u in units(reshaped(PI05, 2, 200, 50)))
    assert total / 1e9 == pytest.approx(0.105, rel=0.1)


def test_more_of_anything_keeps_more() -> None:
    base = sum(u.count * u.eager for u in units(reshaped(PI05, 2, 100, 20)))
    for shape in ((3, 100, 20), (2, 101, 20), (2, 100, 21)):
        assert sum(u.count * u.eager for u in units(reshaped(PI05, *shape))) > base
