"""What backward keeps: bytes that each block saves, from the configuration alone.

`eager`: what Piston's own operations save, counted operation by operation (equal to what autograd's saved-tensor hooks
see). `stock`: the same network on PyTorch's fused GELU, LayerNorm and attention. `compiled`: what a min-cut partitioner
keeps, the inputs of matrix products and attention (an estimate). `inputs`: what full checkpointing keeps.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from piston.config.schema import GemmaConfig, ModelConfig
from piston.model.cost import FLOAT32, linears, total_parameters

Checkpointing = Literal["none", "half", "full"]


@dataclass(frozen=True)
class Unit:
    """`count` equal blocks: parameters of one, and the bytes per sample that each policy keeps for one."""

    name: str
    count: int
    parameters: int
    inputs: int
    eager: int
    stock: int
    compiled: int
    casts: int  # bytes of weights cast to the compute dtype that autograd keeps, whatever the batch
    lean: int = 0  # bytes per sample of temporaries alive at once inside the block's backward, fused operations
    spelled: int = 0  # the same for Piston's operations, whose GELU recomputes its parts

    def saved(self, kernels: str) -> int:
        """Bytes per sample under `eager`, `stock`, `compiled` or `xla` kernels (XLA keeps what a compiler would)."""
        return {"eager": self.eager, "stock": self.stock, "compiled": self.compiled, "xla": self.compiled}[kernels]

    def working(self, kernels: str) -> int:
        """Bytes per sample of temporaries in the block's backward; XLA's are never all alive."""
        return {"eager": self.spelled, "stock": self.lean, "compiled": self.lean, "xla": 0}[kernels]


def compute_bytes(config: ModelConfig) -> int:
    """Bytes of a number in the compute dtype."""
    return 2 if config.dtype == "bfloat16" else FLOAT32


@lru_cache(maxsize=1024)
def units(config: ModelConfig) -> tuple[Unit, ...]:
    """Vision blocks, token embedding, joint blocks, the last joint block and all the rest, in forward order."""
    vocabulary, ids = config.vocab_size * config.paligemma.width, 4 * config.max_token_len
    vision, joint, last = _vision(config), _joint(config), _last_joint(config)
    inside = vocabulary + sum(u.count * u.parameters for u in (vision, joint, last))
    embedding = Unit("token embedding", 1, vocabulary, ids, ids, ids, ids, 0)
    return (vision, embedding, joint, last, _outside(config, total_parameters(config) - inside))


def _matrices(config: ModelConfig, modules: tuple[str, ...], outside: tuple[str, ...] = ()) -> int:
    return sum(i.parameters for i in linears(config) if i.module in modules and i.name not in outside)


def _vision(config: ModelConfig) -> Unit:
    tower, c = config.siglip, compute_bytes(config)
    images, patches = len(config.cameras), config.patches
    rows, width, hidden, heads = images * patches, tower.width, tower.mlp_dim, tower.num_heads
    stream, inner, scores = rows * width, rows * hidden, images * heads * patches * patches
    stock = c * (8 * stream + 2 * inner) + FLOAT32 * rows * (heads + 4)
    # Two norms: x, x − mean and rsqrt·weight in float32, three columns; and what the products behind them read.
    eager = 2 * (3 * FLOAT32 * (stream + rows) + c * stream)
    eager += c * (4 * stream + 2 * inner + rows * heads)
    eager += 2 * c * scores if c < FLOAT32 else 0  # attention spelled out: exponentials and probabilities
    compiled = c * (8 * stream + 2 * inner) + (c * scores if c < FLOAT32 else 0)
    return Unit(
        "vision blocks",
        tower.depth,
        parameters=_matrices(config, ("siglip",), ("patch_embed",)) // tower.depth + 4 * width,
        inputs=c * stream,
        eager=eager,
        stock=stock,
        compiled=compiled,
        casts=c * (4 * width * width + 2 * width * hidden) if c < FLOAT32 else 0,
        lean=c * 3 * inner,
        spelled=c * (7 * inner + 7 * scores),
    )


def _norm(rows: int, width: int, c: int, copies: int = 2) -> int:
    """RMS norm: `copies` of x and x/rms in float32, two columns, and the result in the compute dtype."""
    return rows * (copies * FLOAT32 * width + 2 * FLOAT32 + c * width)


def _spelled_norms(c: int) -> int:
    """float32 rows that Piston's RMS norm keeps: x/rms and x, cast twice from bfloat16 to round as the reference."""
    return 3 if c < FLOAT32 else 2


def _joint(config: ModelConfig) -> Unit:
    vlm, expert, c = config.paligemma, config.action_expert, compute_bytes(config)
    prefix, suffix = config.prefix_len, config.suffix_len
    norms = 2 * _norm(prefix, vlm.width, c) + 2 * _norm(suffix, expert.width, c) + _gates(config)
    casts = (_spelled_norms(c) - 2) * FLOAT32 * 2 * (prefix * vlm.width + suffix * expert.width)
    attention = _attention(config, prefix + suffix)
    attention_eager = attention + c * (prefix + suffix) * vlm.num_heads * vlm.head_dim  # each expert's rows gathered
    mlp = c * (prefix * vlm.mlp_dim + suffix * expert.mlp_dim)
    streams = c * (prefix * vlm.width + suffix * expert.width)
    return Unit(
        "joint blocks",
        vlm.depth - 1,
        parameters=_joint_parameters(config),
        inputs=streams,
        eager=norms + casts + attention_eager + 4 * mlp,  # gate, up, gelu, product
        stock=norms + attention_eager + 4 * mlp,
        compiled=attention + 4 * streams + 3 * mlp,
        casts=c * _elements(config) if c < FLOAT32 else 0,
        lean=3 * c * prefix * vlm.mlp_dim,
        spelled=(7 if c < FLOAT32 else 3) * c * prefix * vlm.mlp_dim,
    )


def _last_joint(config: ModelConfig) -> Unit:
    """Prefix rows only give keys and values here; nothing else of them is computed."""
    vlm, expert, c = config.paligemma, config.action_expert, compute_bytes(config)
    prefix, suffix = config.prefix_len, config.suffix_len
    norms = _norm(prefix, vlm.width, c) + 2 * _norm(suffix, expert.width, c) + _gates(config)
    casts = (_spelled_norms(c) - 2) * FLOAT32 * (prefix * vlm.width + 2 * suffix * expert.width)
    attention, mlp = _attention(config, suffix), c * suffix * expert.mlp_dim
    prefix_stream, suffix_stream = c * prefix * vlm.width, c * suffix * expert.width
    return Unit(
        "last joint block",
        1,
        parameters=_joint_parameters(config),
        inputs=prefix_stream + suffix_stream + (prefix + suffix) ** 2,  # and the boolean mask, held for all blocks
        eager=norms + casts + attention + 4 * mlp,
        stock=norms + attention + 4 * mlp,
        compiled=attention + 2 * prefix_stream + 4 * suffix_stream + 3 * mlp,
        casts=c * (_elements(config) - _asking_elements(vlm)) if c < FLOAT32 else 0,
    )


def _attention(config: ModelConfig, asking: int) -> int:
    """Queries, keys, values, result, the mask as an additive array, and the row sums."""
    vlm, c = config.paligemma, compute_bytes(config)
    tokens = config.prefix_len + config.suffix_len
    inner, kv = vlm.num_heads * vlm.head_dim, vlm.num_kv_heads * vlm.head_dim
    return c * (2 * asking * inner + 2 * tokens * kv + asking * tokens) + FLOAT32 * asking * vlm.num_heads


def _gates(config: ModelConfig) -> int:
    """π0.5: what the two gated residuals multiply, and per norm the condition, 1 + scale and the modulation."""
    width = config.action_expert.width
    return 2 * compute_bytes(config) * (config.suffix_len * width + 5 * width) if config.pi05 else 0


def _joint_parameters(config: ModelConfig) -> int:
    width = config.action_expert.width
    final = 3 * width * (width + 1) if config.pi05 else 0  # the final norm's modulation
    matrices = (_matrices(config, ("gemma", "expert", "adarms")) - final) // config.paligemma.depth
    return matrices + 2 * config.paligemma.width + (0 if config.pi05 else 2 * width)


def _asking_elements(gemma: GemmaConfig) -> int:
    """Query, output and MLP weights: what the last layer's prefix does without."""
    return 2 * gemma.width * gemma.num_heads * gemma.head_dim + 3 * gemma.width * gemma.mlp_dim


def _elements(config: ModelConfig) -> int:
    """Weights of one joint block's products."""
    total = 6 * config.action_expert.width**2 if config.pi05 else 0
    for gemma in (config.paligemma, config.action_expert):
        total += _asking_elements(gemma) + 2 * gemma.width * gemma.num_kv_heads * gemma.head_dim
    return total


def _outside(config: ModelConfig, parameters: int) -> Unit:
    """Stem, projector, final norm, heads, loss, rotary angles: small next to the blocks."""
    tower, width, c = config.siglip, config.action_expert.width, compute_bytes(config)
    rows, steps, dim, suffix = (
        len(config.cameras) * config.patches, config.action_horizon, config.action_dim, config.suffix_len,
    )  # fmt: skip
    tokens = config.prefix_len + suffix
    saved = FLOAT32 * rows * 3 * tower.patch_size[0] * tower.patch_size[1]  # patches
    saved += rows * tower.width * (3 * FLOAT32 + c) + 3 * FLOAT32 * rows  # last vision norm, the projector's input
    saved += FLOAT32 * tokens * config.paligemma.head_dim  # cos and sin
    saved += _norm(suffix, width, 0, _spelled_norms(c)) + FLOAT32 * (
        suffix * width + 2 * steps * dim
    )  # final norm, head, loss
    casts = tower.width * config.paligemma.width
    if config.pi05:
        saved += 6 * FLOAT32 * width + 2 * c * width
        casts += 3 * width * width
    else:
        saved += FLOAT32 * (steps * 4 * width + dim)
    return Unit(
        "everything else", 1, parameters, saved, saved, saved, saved, c * casts if c < FLOAT32 else 0
    )  # fmt: skip
