"""Fresh parameters have the distribution of the reference's, at real width and cut depth."""

import json
from pathlib import Path

import pytest
import torch

from piston.config.schema import GEMMA_VARIANTS, SO400M, LoraConfig, ModelConfig
from piston.model.pi0 import Pi0
from piston.model.weights import to_openpi_jax


def config_of(shapes: dict[str, list[int]], *, pi05: bool) -> ModelConfig:
    """The architecture that a recorded set of shapes belongs to."""
    import dataclasses

    def expert(suffix: str, name: str):
        layers = "PaliGemma/llm/layers"
        depth, _, width, mlp_dim = shapes[f"{layers}/mlp{suffix}/gating_einsum"]
        lora = shapes.get(f"{layers}/attn/q_einsum{suffix}/lora_a")
        rank = None if lora is None else LoraConfig(lora[-1], float(lora[-1]))
        return dataclasses.replace(
            GEMMA_VARIANTS[name], depth=depth, width=width, mlp_dim=mlp_dim, lora_attn=rank, lora_ffn=rank
        )

    block = "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"
    return ModelConfig(
        pi05=pi05,
        paligemma=expert("", "gemma_2b"),
        action_expert=expert("_1", "gemma_300m"),
        siglip=dataclasses.replace(SO400M, depth=shapes[block][0], mlp_dim=shapes[block][2]),
        vocab_size=shapes["PaliGemma/llm/embedder/input_embedding"][0],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pi05"), [("pi05", True), ("pi0", False), ("lora", None)])
def test_initial_distribution(golden: Path, name: str, pi05: bool | None) -> None:
    recorded = json.loads((golden / f"init_stats_{name}.json").read_text())["params"]
    shapes = {path: entry["shape"] for path, entry in recorded.items()}
    config = config_of(shapes, pi05=any("time_mlp_in" in p for p in shapes) if pi05 is None else pi05)
    model = Pi0.build(config, device="cpu", seed=7)
    ours = to_openpi_jax(config, model.state_dict())
    assert {k: list(v.shape) for k, v in ours.items()} == shapes
    for path, entry in recorded.items():
        values = ours[path].double()
        count, std = values.numel(), entry["std"]
        sampling = std / count**0.5
        assert abs(values.mean().item() - entry["mean"]) <= 6 * sampling + 1e-12, path
        assert values.std(unbiased=False).item() == pytest.approx(std, rel=8 / count**0.5 + 1e-3, abs=1e-12), path
        if std > 0:
            largest = values.abs().max().item() / std
            bound = entry["max_abs_over_std"]
            # Bounded distributions (uniform, truncated) have a hard edge, the others one that grows with the count.
            assert largest <= bound * (1.01 if bound < 2.4 else 1.6), (
                f"{path}: |x| up to {largest:.2f} std, {bound:.2f}"
            )
            if "kurtosis" in entry:
                kurtosis = ((values - values.mean()) ** 4).mean().item() / values.var(unbiased=False).item() ** 2
                assert kurtosis == pytest.approx(entry["kurtosis"], abs=60 / count**0.5 + 0.02), path
        del values
    assert torch.get_default_dtype() == torch.float32
