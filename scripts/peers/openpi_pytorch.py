"""Actions of a checkpoint in openpi's PyTorch port: `openpi_pytorch.py DIR`, in a venv of its own.

pip install torch "transformers>=4.57,<4.58" pytest
pip install --no-deps -r scripts/openpi_live/requirements-openpi.txt
"""

import json
import sys
import types
from pathlib import Path

import numpy as np
import openpi
import safetensors.torch
import torch
from shrink import gemma_sizes, shrink

torch.compile = lambda function, **kwargs: function  # the port compiles its sampling when it is built

# Modules that the port takes a table of sizes and an unused resize from, and that need JAX.
gemma, models = types.ModuleType("openpi.models.gemma"), types.ModuleType("openpi.models")
tools, shared = types.ModuleType("openpi.shared.image_tools"), types.ModuleType("openpi.shared")
models.gemma, shared.image_tools, openpi.models, openpi.shared = gemma, tools, models, shared  # type: ignore
sys.modules |= {module.__name__: module for module in (gemma, models, tools, shared)}

from openpi.models_pytorch import gemma_pytorch, pi0_pytorch, preprocessing_pytorch  # noqa: E402


def main(directory: Path) -> None:
    arch = json.loads((directory / "arch.json").read_text())
    inputs = {name: torch.from_numpy(array) for name, array in np.load(directory / "inputs.npz").items()}
    gemma.get_config = gemma_sizes(arch)
    shrink(gemma_pytorch, ("PaliGemmaForConditionalGeneration", "GemmaForCausalLM"), arch)
    preprocess = preprocessing_pytorch.preprocess_observation_pytorch
    preprocess.__kwdefaults__.update(image_resolution=tuple(arch["image_resolution"]))
    config = types.SimpleNamespace(
        pi05=arch["pi05"], paligemma_variant="vlm", action_expert_variant="expert", dtype="float32",
        action_horizon=arch["action_horizon"], action_dim=arch["action_dim"],
    )  # fmt: skip
    model = pi0_pytorch.PI0Pytorch(config).eval()
    torch.set_float32_matmul_precision("highest")
    # As openpi's policy_config does it: strict but for tied tensors.
    safetensors.torch.load_model(model, directory / "openpi-pytorch" / "model.safetensors")
    observation = types.SimpleNamespace(
        images={key: inputs[f"images/{key}"].permute(0, 3, 1, 2) for key in arch["image_keys"]},
        image_masks={key: inputs[f"image_masks/{key}"] for key in arch["image_keys"]},
        state=inputs["state"],
        tokenized_prompt=inputs["tokenized_prompt"],
        tokenized_prompt_mask=inputs["tokenized_prompt_mask"],
        token_ar_mask=None,
        token_loss_mask=None,
    )
    actions = model.sample_actions("cpu", observation, noise=inputs["noise"], num_steps=10)
    np.save(directory / "actions_openpi_pytorch.npy", actions.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
