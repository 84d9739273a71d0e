"""Makes Hugging Face's PaliGemma and Gemma classes, as the two PyTorch ports build them, as small as a given model.

The ports fix the vision tower, the vocabulary and the projection's width in their constructors; only those sizes are
replaced, when the classes are called. No file of theirs is edited.
"""

from typing import Any


def gemma_sizes(arch: dict[str, Any]) -> Any:
    """A stand-in for the ports' table of Gemma variants: "vlm" and "expert" of the architecture."""
    import types

    return lambda part: types.SimpleNamespace(**arch[part], lora_configs={})


def shrink(module: Any, names: tuple[str, str], arch: dict[str, Any]) -> None:
    """Replaces the two classes (PaliGemma's, the expert's) that `module` builds its model from."""
    paligemma, expert = (getattr(module, name) for name in names)
    tower = arch["siglip"]

    def small_paligemma(config: Any) -> Any:
        config._vocab_size = config.text_config.vocab_size = arch["vocab"]
        config.image_token_index = arch["vocab"] - 1
        sizes = {
            "hidden_size": tower["width"], "num_hidden_layers": tower["depth"], "intermediate_size": tower["mlp_dim"],
            "num_attention_heads": tower["num_heads"], "patch_size": tower["patch_size"][0],
            "image_size": arch["image_resolution"][0], "projection_dim": arch["vlm"]["width"],
        }  # fmt: skip
        for name, value in sizes.items():
            setattr(config.vision_config, name, value)
        return paligemma(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = arch["vocab"]
        return expert(config=config)

    setattr(module, names[0], small_paligemma)
    setattr(module, names[1], small_expert)
