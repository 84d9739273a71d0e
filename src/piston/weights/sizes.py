"""The model a file holds, from the names and shapes of its tensors: π0 or π0.5, every width, depth, and LoRA.

What no shape says (heads of the vision tower in PyTorch files, horizon, prompt length, LoRA's alpha) is taken from
`like` where the file or the user gives one, else from openpi's released models; `guessed` names what was.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping

from piston.config.schema import SO400M, GemmaConfig, LoraConfig, ModelConfig, SiglipConfig
from piston.weights.files import Spec
from piston.weights.links import EXPERT, LANGUAGE, TIED_HEAD, VISION

# Tensor → what its axes are; "." is an axis that says nothing new.
_LLM, _TOWER = "PaliGemma/llm", "PaliGemma/img"
_VLM_JAX = {
    f"{_TOWER}/embedding/kernel": "ph pw . vision",
    f"{_TOWER}/pos_embedding": ". patches .",
    f"{_TOWER}/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": "vision_depth . vision_mlp",
    f"{_TOWER}/Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel": ". . vision_heads .",
    f"{_LLM}/embedder/input_embedding": "vocab width",
    f"{_LLM}/layers/attn/q_einsum/w": "depth heads . head_dim",
    f"{_LLM}/layers/attn/kv_einsum/w": ". . kv_heads . .",
    f"{_LLM}/layers/mlp/gating_einsum": ". . . mlp",
}
_HEADS_JAX = {
    f"{_LLM}/layers/mlp_1/gating_einsum": ". . expert_width expert_mlp",
    "action_in_proj/kernel": "action_dim .",
}
_LORA_JAX = {
    f"{_LLM}/layers/attn/q_einsum/lora_a": ". . . lora_attn",
    f"{_LLM}/layers/mlp/gating_einsum_lora_a": ". . . lora_ffn",
    f"{_LLM}/layers/attn/q_einsum_1/lora_a": ". . . expert_lora_attn",
    f"{_LLM}/layers/mlp_1/gating_einsum_lora_a": ". . . expert_lora_ffn",
}
_HF = {
    f"{VISION}.embeddings.patch_embedding.weight": "vision . ph pw",
    f"{VISION}.embeddings.position_embedding.weight": "patches .",
    f"{VISION}.encoder.layers.0.mlp.fc1.weight": "vision_mlp .",
    TIED_HEAD: "vocab width",
    f"{LANGUAGE}.layers.0.self_attn.q_proj.weight": "q_rows .",
    f"{LANGUAGE}.layers.0.self_attn.k_proj.weight": "kv_rows .",
    f"{LANGUAGE}.layers.0.mlp.gate_proj.weight": "mlp .",
    f"{EXPERT}.layers.0.mlp.gate_proj.weight": "expert_mlp expert_width",
    "action_in_proj.weight": ". action_dim",
}
_RLINF = {
    "img.stem.weight": "vision . ph pw",
    "img.pos_embedding": ". patches .",
    "img.encoder.layers.0.mlp.fc1.weight": "vision_mlp .",
    "llm.embedder.embedding.weight": "vocab width",
    "llm.layers.0.attn.q_proj.0.weight": "q_rows .",
    "llm.layers.0.attn.k_proj.0.weight": "kv_rows .",
    "llm.layers.0.mlps.0.w_gating": ". . mlp",
    "llm.layers.0.mlps.1.w_gating": ". expert_width expert_mlp",
    "action_in_proj.weight": ". action_dim",
}
PROBES: dict[str, dict[str, str]] = {
    "openpi-jax": _VLM_JAX | _HEADS_JAX,
    "paligemma": {name.replace("PaliGemma/", "params/"): axes for name, axes in _VLM_JAX.items()},
    "openpi-pytorch": _HF,
    "lerobot": {f"model.{name}": axes for name, axes in _HF.items()},
    "rlinf": _RLINF,
}
DEPTHS = {  # where layers are not stacked, they are counted
    "openpi-pytorch": (rf"{re.escape(LANGUAGE)}\.layers\.(\d+)\.", rf"{re.escape(VISION)}\.encoder\.layers\.(\d+)\."),
    "lerobot": (
        rf"model\.{re.escape(LANGUAGE)}\.layers\.(\d+)\.",
        rf"model\.{re.escape(VISION)}\.encoder\.layers\.(\d+)\.",
    ),
    "rlinf": (r"llm\.layers\.(\d+)\.", r"img\.encoder\.layers\.(\d+)\."),
}


@dataclasses.dataclass(frozen=True)
class Inferred:
    """The model, and the fields of it that no tensor told."""

    config: ModelConfig
    guessed: tuple[str, ...]


def infer_model(layout: str, specs: Mapping[str, Spec], like: ModelConfig | None, where: str) -> Inferred:
    """The configuration of the model in a file of one of PROBES' layouts. `like`: what it should be, if known.

    Raises ValueError, naming the tensors, if those that tell the sizes are missing or oddly shaped.
    """
    sizes, guessed = _measured(layout, specs, where), []
    if layout in DEPTHS:
        for key, pattern in zip(("depth", "vision_depth"), DEPTHS[layout], strict=True):
            sizes[key] = 1 + max(int(found[1]) for name in specs if (found := re.match(pattern, name)))
    vlm = _vlm(sizes, like, where)
    siglip = SiglipConfig(
        sizes["vision"], sizes["vision_depth"], sizes["vision_mlp"],
        sizes.get("vision_heads") or _vision_heads(sizes["vision"], like, where), (sizes["ph"], sizes["pw"]),
    )  # fmt: skip
    expert = dataclasses.replace(
        vlm, width=sizes.get("expert_width", vlm.width), mlp_dim=sizes.get("expert_mlp", vlm.mlp_dim)
    )
    if layout == "openpi-jax":
        like_vlm, like_expert = (like.paligemma, like.action_expert) if like else (None, None)
        vlm, expert = (
            _with_lora(vlm, "", specs, like_vlm, guessed),
            _with_lora(expert, "expert_", specs, like_expert, guessed),
        )
    pi05 = _is_pi05(specs)
    rest = {"action_horizon": 50, "max_token_len": 200 if pi05 else 48, "dtype": "bfloat16"}
    rest |= {"discrete_state_input": pi05, "cameras": ModelConfig().cameras}
    if like is not None and like.pi05 == pi05:
        rest = {name: getattr(like, name) for name in rest}
    else:
        guessed += ["action_horizon", "max_token_len", "discrete_state_input", "cameras"]
    config = ModelConfig(
        pi05=pi05,
        paligemma=vlm,
        action_expert=expert,
        siglip=siglip,
        vocab_size=sizes["vocab"],
        image_size=_image_size(sizes, like, where),
        action_dim=sizes.get("action_dim", ModelConfig().action_dim),
        **rest,
    )
    return Inferred(config, tuple(guessed))


def _is_pi05(names: Collection[str]) -> bool:
    """π0.5 has a time MLP; π0 a state projection. A file with both or neither is refused by the strict comparison."""
    stems = {re.split(r"[./]", name.removeprefix("model."))[0] for name in names}
    return "time_mlp_in" in stems or "time_mlp_out" in stems


def _measured(layout: str, specs: Mapping[str, Spec], where: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    problems = []
    for name, axes in PROBES[layout].items():
        found, labels = specs.get(name), axes.split()
        if found is None:
            problems.append(f"missing {name}")
        elif len(found.shape) != len(labels) or 0 in found.shape:
            problems.append(f"shape of {name} is {found.shape}, expected {len(labels)} axes: {axes}")
        else:
            for label, size in zip(labels, found.shape, strict=True):
                sizes.setdefault(label, size)
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(
            f"{where} looks like {layout}, but its sizes cannot be read from {len(problems)} tensors; expected a whole "
            f"π0 or π0.5:\n  {listing}\nNothing else was compared: use an undamaged file"
        )
    return sizes


def _vlm(sizes: Mapping[str, int], like: ModelConfig | None, where: str) -> GemmaConfig:
    if "head_dim" in sizes:
        heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    else:
        kv_heads = like.paligemma.num_kv_heads if like else 1  # as in every Gemma of π0 and π0.5
        head_dim, left = divmod(sizes["kv_rows"], kv_heads)
        heads, rest = divmod(sizes["q_rows"], head_dim)
        if left or rest:
            raise ValueError(
                f"{where} has {sizes['q_rows']} query and {sizes['kv_rows']} key rows, expected multiples of a head of "
                f"{kv_heads} key head(s); the file is damaged, or pass --recipe with the right sizes"
            )
    return GemmaConfig(sizes["width"], sizes["depth"], sizes["mlp"], heads, kv_heads, head_dim)


def _vision_heads(width: int, like: ModelConfig | None, where: str) -> int:
    """PyTorch files do not tell the heads of the tower; So400m, the only released one, has 16."""
    for known in (like.siglip if like else None, SO400M):
        if known is not None and known.width == width:
            return known.num_heads
    raise ValueError(
        f"{where} has a vision tower of width {width}, whose number of heads no tensor tells; expected SigLIP So400m "
        f"({SO400M.width}, {SO400M.num_heads} heads): pass a recipe or run.json with this tower, --recipe"
    )


def _image_size(sizes: Mapping[str, int], like: ModelConfig | None, where: str) -> tuple[int, int]:
    patches, patch = sizes["patches"], (sizes["ph"], sizes["pw"])
    if like is not None and like.patches == patches and like.siglip.patch_size == patch:
        return like.image_size
    side = math.isqrt(patches)
    if side * side != patches:
        raise ValueError(
            f"{where} has {patches} image positions, expected a square number; pass --recipe with the image size"
        )
    return side * patch[0], side * patch[1]


def _with_lora(
    gemma: GemmaConfig, prefix: str, specs: Mapping[str, Spec], like: GemmaConfig | None, guessed: list[str]
) -> GemmaConfig:
    """Ranks from the factors' shapes. No tensor tells alpha: openpi's variants have alpha = rank."""
    found: dict[str, LoraConfig | None] = {}
    for (name, axes), field in zip(_LORA_JAX.items(), ("lora_attn", "lora_ffn") * 2, strict=True):
        if axes.split()[-1] != prefix + field or name not in specs:
            continue
        rank = specs[name].shape[-1]
        known = getattr(like, field) if like else None
        if known is not None and known.rank == rank:
            found[field] = known
        else:
            found[field] = LoraConfig(rank, float(rank))
            guessed.append(f"{prefix}{field}.alpha")
    return dataclasses.replace(gemma, **found)
