"""Actions of a checkpoint in LeRobot, by its own from_pretrained: `lerobot.py DIR`, in a venv with `lerobot[pi]`.

Also loads the pre- and postprocessor and writes out what they do to a state and an action.
"""

import sys
from pathlib import Path

sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lerobot.configs import PreTrainedConfig  # noqa: E402
from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

spec = importlib.util.spec_from_file_location("shrink", Path(__file__).parent / "shrink.py")
assert spec is not None
assert spec.loader is not None
shrinking = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shrinking)


VLM, EXPERT = "gemma_2b", "gemma_300m"  # LeRobot refuses other names, so the small sizes stand under these


def load(directory: Path, arch: dict[str, Any]) -> Any:
    """The policy, checked against the file tensor by tensor: LeRobot only warns about what it could not load."""
    kind = "pi05" if arch["pi05"] else "pi0"
    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    module.get_gemma_config = shrinking.gemma_sizes({VLM: arch["vlm"], EXPERT: arch["expert"]})
    shrinking.shrink(module, ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"), arch)
    config = PreTrainedConfig.from_pretrained(directory)
    config.device = "cpu"
    policy = get_policy_class(config.type).from_pretrained(directory, config=config).eval()
    held, stored = dict(policy.state_dict()), load_file(directory / "model.safetensors")
    wrong = [name for name, tensor in stored.items() if name not in held or not torch.equal(held[name], tensor)]
    tied = {name for name in held if name.endswith("language_model.embed_tokens.weight")}
    if wrong or held.keys() - stored.keys() - tied:
        raise SystemExit(f"LeRobot did not load {wrong}, and has no value for {held.keys() - stored.keys() - tied}")
    return policy


def processed(directory: Path, policy: Any, inputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    class Tokenizer:
        def __call__(self, text: Any, *, max_length: int, **kwargs: Any) -> dict[str, torch.Tensor]:
            count = len(text) if isinstance(text, list) else 1
            zeros = torch.zeros(count, max_length, dtype=torch.long)
            return {"input_ids": zeros, "attention_mask": zeros}

    # The tokenizer's files are on Hugging Face's hub only; everything else is what Piston wrote.
    chosen = {"tokenizer_processor": {"tokenizer": Tokenizer(), "tokenizer_name": None}}
    before, after = make_pre_post_processors(policy.config, str(directory), preprocessor_overrides=chosen)
    features = policy.config.input_features
    observation = {name: torch.zeros(f.shape) for name, f in features.items() if "images" in name}
    ready = before({**observation, "observation.state": inputs["raw_state"], "task": "pick it up"})
    back = after(inputs["raw_action"][None])
    return {"state": ready["observation.state"].numpy(), "action": back.numpy()}


def main(directory: Path) -> None:
    arch = json.loads((directory / "arch.json").read_text())
    inputs = {name: torch.from_numpy(array) for name, array in np.load(directory / "inputs.npz").items()}
    policy = load(directory / "lerobot", arch)
    keys = arch["image_keys"]
    prefix = (
        [inputs[f"images/{key}"].permute(0, 3, 1, 2) for key in keys],
        [inputs[f"image_masks/{key}"] for key in keys],
        inputs["tokenized_prompt"],
        inputs["tokenized_prompt_mask"],
    )
    state = () if arch["pi05"] else (inputs["state"],)
    with torch.no_grad():
        actions = policy.model.sample_actions(*prefix, *state, noise=inputs["noise"], num_steps=10)
    np.save(directory / "actions_lerobot.npy", actions.numpy())
    np.savez(directory / "processed_lerobot.npz", **processed(directory / "lerobot", policy, inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
