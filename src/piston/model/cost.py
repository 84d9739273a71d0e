"""What the model costs: parameters, FLOPs and saved bytes of every module, from the configuration alone (no torch).

The list of products below is the network written down once more as arithmetic. It is equal to what torch counts on the
real model: parameters to the unit, FLOPs to the unit (`torch.utils.flop_counter`), saved bytes as tests say. A FLOP is
a multiplication or an addition of a matrix product; elementwise work is not counted, as in torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from piston.config.schema import GemmaConfig, LoraConfig, ModelConfig

Dead = Literal["skipped", "computed", "scanned"]
"""The last layer's prefix query, output projection and MLP, which a flow-only loss never reads: `skipped` (Piston),
`computed` in forward and dropped by autograd (PyTorch ports), or `scanned`: both ways (JAX's scanned layers)."""

FLOAT32, BFLOAT16 = 4, 2
MODULES: tuple[str, ...] = ("siglip", "projector", "embedding", "gemma", "expert", "adarms", "heads")


@dataclass(frozen=True)
class Linear:
    """One weight and how a sample uses it: `rows` input rows of `d_in`, giving `d_out`; `live` is False: no backward.

    `count` equal layers. `bias` is in parameters, not in FLOPs. `input_grad` is False where the input is data.
    """

    module: str
    name: str
    rows: int
    d_in: int
    d_out: int
    count: int = 1
    bias: bool = False
    live: bool = True
    input_grad: bool = True
    trained: bool = True
    held: int | None = None  # weights in the model if not `count`: a dead layer is still a parameter

    @property
    def parameters(self) -> int:
        copies = self.count if self.held is None else self.held
        return copies * self.d_out * (self.d_in + (1 if self.bias else 0))

    @property
    def forward(self) -> int:
        return 2 * self.count * self.rows * self.d_in * self.d_out

    @property
    def backward(self) -> int:
        return self.forward * (int(self.input_grad) + int(self.trained)) if self.live else 0


@dataclass(frozen=True)
class Attention:
    """softmax(q·kᵀ)·v for `count` layers: `queries` × `keys` scores in `heads` heads of `head_dim`, per sample."""

    module: str
    queries: int
    keys: int
    heads: int
    head_dim: int
    count: int
    batch: int = 1  # images per sample

    @property
    def forward(self) -> int:
        return 2 * 2 * self.count * self.batch * self.queries * self.keys * self.heads * self.head_dim

    def backward(self, fused: bool) -> int:
        """A fused kernel computes the scores once more: five products for the forward pass's two; else four."""
        return self.forward * 5 // 2 if fused else self.forward * 2


@dataclass(frozen=True)
class Flops:
    """FLOPs of one training sample."""

    forward: int
    backward: int
    recompute: int = 0

    @property
    def model(self) -> int:
        """Forward and backward: what MFU counts."""
        return self.forward + self.backward

    @property
    def executed(self) -> int:
        """With recomputation: what HFU counts."""
        return self.model + self.recompute


@lru_cache(maxsize=1024)
def linears(config: ModelConfig, dead: Dead = "skipped") -> tuple[Linear, ...]:
    """Every weight matrix of the network with its rows per sample. Source: openpi models/{pi0,gemma,siglip,lora}.py."""
    whole = (*_vision(config), *_joint(config, dead), *_heads(config))
    return tuple(item if _learns(config, item) else _frozen(item) for item in whole)


GROUP_OF = {"siglip": "vision", "projector": "vision", "gemma": "vlm", "expert": "expert", "adarms": "expert"}


def _learns(config: ModelConfig, item: Linear) -> bool:
    return GROUP_OF.get(item.module, item.module) not in config.freeze or item.name.endswith((".a", ".b", ".b.heads"))


def _frozen(item: Linear) -> Linear:
    """No gradient of the weights, and in the vision tower, which nothing trained comes before, none at all."""
    return replace(item, trained=False, input_grad=item.input_grad and GROUP_OF.get(item.module) != "vision")


def _vision(config: ModelConfig) -> Iterator[Linear]:
    tower, rows = config.siglip, len(config.cameras) * config.patches
    width, depth = tower.width, tower.depth
    pixels = tower.patch_size[0] * tower.patch_size[1] * 3
    yield Linear("siglip", "patch_embed", rows, pixels, width, bias=True, input_grad=False)
    yield Linear("siglip", "qkv", rows, width, 3 * width, depth, bias=True)
    yield Linear("siglip", "out", rows, width, width, depth, bias=True)
    yield Linear("siglip", "fc1", rows, width, tower.mlp_dim, depth, bias=True)
    yield Linear("siglip", "fc2", rows, tower.mlp_dim, width, depth, bias=True)
    yield Linear("projector", "head", rows, width, config.paligemma.width, bias=True)


def _expert(
    module: str, gemma: GemmaConfig, rows: int, depth: int, trained: bool, *, held: int | None, live: bool = True
) -> Iterator[Linear]:
    """Query, output and MLP of one expert in `depth` layers, `held` of them stored."""
    width, inner = gemma.width, gemma.num_heads * gemma.head_dim
    attn, ffn = gemma.lora_attn, gemma.lora_ffn
    shape = (("q", width, inner, attn, gemma.num_heads), ("o", inner, width, attn, -gemma.num_heads))
    mlp = (("gate_up", width, 2 * gemma.mlp_dim, ffn, 2), ("down", gemma.mlp_dim, width, ffn, -1))
    for name, d_in, d_out, lora, groups in (*shape, *mlp):
        # The dead layer's query still meets autograd: its gradient is zero, not absent.
        alive = live or name == "q"
        yield Linear(module, name, rows, d_in, d_out, depth, live=alive, trained=trained, held=held)
        yield from _adapter(module, name, rows, d_in, d_out, lora, groups, depth, alive, held)


def _adapter(
    module: str, name: str, rows: int, d_in: int, d_out: int, lora: LoraConfig | None, groups: int, depth: int,
    live: bool, held: int | None,
) -> Iterator[Linear]:  # fmt: skip
    """Low-rank factors: `groups` > 0 fans out (A per group, B per group), < 0 fans in (A over all, B summed)."""
    if lora is None:
        return
    if groups > 0:
        yield Linear(module, f"{name}.a", rows, d_in, groups * lora.rank, depth, live=live, held=held)
        yield Linear(module, f"{name}.b", rows, lora.rank, d_out, depth, live=live, held=held)
    else:
        yield Linear(module, f"{name}.a", rows, d_in, lora.rank, depth, live=live, held=held)
        yield Linear(module, f"{name}.b", rows, lora.rank, d_out, depth, live=live, held=held)
        if groups < -1:  # B is stored per head and summed before the product
            extra = (held if held is not None else depth) * (-groups - 1)
            yield Linear(module, f"{name}.b.heads", 0, lora.rank, d_out, 0, live=live, held=extra)


def _joint(config: ModelConfig, dead: Dead) -> Iterator[Linear]:
    vlm, expert = config.paligemma, config.action_expert
    prefix, suffix, depth = config.prefix_len, config.suffix_len, config.paligemma.depth
    trained = vlm.lora_attn is None and vlm.lora_ffn is None
    trained_expert = expert.lora_attn is None and expert.lora_ffn is None
    whole = depth if dead == "scanned" else depth - 1
    yield from _expert("gemma", vlm, prefix, whole, trained, held=depth)
    if dead == "computed":
        yield from _expert("gemma", vlm, prefix, 1, trained, held=0, live=False)
    yield from _expert("expert", expert, suffix, depth, trained_expert, held=None)
    for module, gemma, rows, train in (("gemma", vlm, prefix, trained), ("expert", expert, suffix, trained_expert)):
        d_out = 2 * gemma.num_kv_heads * gemma.head_dim
        yield Linear(module, "kv", rows, gemma.width, d_out, depth, trained=train)
        yield from _adapter(
            module, "kv", rows, gemma.width, d_out, gemma.lora_attn, 2 * gemma.num_kv_heads, depth, True, None
        )
    if config.pi05:
        yield Linear("adarms", "modulation", 1, expert.width, 3 * expert.width, 2 * depth + 1, bias=True)


def _heads(config: ModelConfig) -> Iterator[Linear]:
    width, dim, steps = config.action_expert.width, config.action_dim, config.action_horizon
    yield Linear("heads", "action_in_proj", steps, dim, width, bias=True, input_grad=False)
    yield Linear("heads", "action_out_proj", steps, width, dim, bias=True)
    if config.pi05:
        yield Linear("heads", "time_mlp_in", 1, width, width, bias=True, input_grad=False)
        yield Linear("heads", "time_mlp_out", 1, width, width, bias=True)
    else:
        yield Linear("heads", "state_proj", 1, dim, width, bias=True, input_grad=False)
        yield Linear("heads", "action_time_mlp_in", steps, 2 * width, width, bias=True)
        yield Linear("heads", "action_time_mlp_out", steps, width, width, bias=True)


def attentions(config: ModelConfig, dead: Dead = "skipped") -> list[Attention]:
    """Every attention of the network."""
    tower, vlm = config.siglip, config.paligemma
    tokens, heads, head_dim = config.prefix_len + config.suffix_len, vlm.num_heads, vlm.head_dim
    asking = config.suffix_len if dead == "skipped" else tokens
    vision = Attention(
        "siglip", config.patches, config.patches, tower.num_heads, tower.width // tower.num_heads, tower.depth,
        len(config.cameras),
    )  # fmt: skip
    return [
        vision,
        Attention("gemma", tokens, tokens, heads, head_dim, vlm.depth - 1),
        Attention("gemma", asking, tokens, heads, head_dim, 1),
    ]


def _vectors(config: ModelConfig) -> dict[str, int]:
    """Parameters that are in no matrix product: norms, position embedding, token embedding."""
    tower, vlm, expert = config.siglip, config.paligemma, config.action_expert
    norms = 2 * vlm.depth + 1
    return {
        "siglip": config.patches * tower.width + 2 * tower.width * (2 * tower.depth + 1),
        "embedding": config.vocab_size * vlm.width,
        "gemma": norms * vlm.width,
        "expert": 0 if config.pi05 else norms * expert.width,
    }


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of each module; their sum is the model's."""
    counts: dict[str, int] = {module: 0 for module in MODULES}
    for item in linears(config):
        counts[item.module] += item.parameters
    for module, count in _vectors(config).items():
        counts[module] += count
    return counts


def total_parameters(config: ModelConfig) -> int:
    """All parameters, dead and frozen ones included."""
    return sum(parameters(config).values())


def trained_parameters(config: ModelConfig) -> int:
    """Parameters with a gradient slot: with LoRA on an expert, that expert's own weights are frozen.

    Source: openpi models/pi0_config.py (get_freeze_filter); freezing PaliGemma freezes the token embedding too.
    """
    vlm, expert = config.paligemma, config.action_expert
    frozen = sum(item.parameters for item in linears(config) if not item.trained)
    vectors = _vectors(config)
    if "vision" in config.freeze:
        frozen += vectors["siglip"]
    if vlm.lora_attn is not None or vlm.lora_ffn is not None or "vlm" in config.freeze:
        frozen += vectors["embedding"] + vectors["gemma"]
    if expert.lora_attn is not None or expert.lora_ffn is not None or "expert" in config.freeze:
        frozen += vectors["expert"]
        frozen += sum(i.parameters for i in linears(config) if i.module == "adarms" and i.trained)
    return total_parameters(config) - frozen


def dead_parameters(config: ModelConfig) -> int:
    """Parameters that a flow-only loss never reads: last prefix layer but for key and value, and the final norm."""
    vlm = config.paligemma
    one_layer = sum(item.parameters for item in _expert("gemma", vlm, 0, 1, True, held=1))
    return one_layer + 2 * vlm.width  # its second norm and the final norm


def flops(
    config: ModelConfig, dead: Dead = "skipped", *, fused_attention: bool = True, fused_vision: bool = True
) -> Flops:
    """FLOPs of one training sample without recomputation. `fused_*`: the attention kernel keeps no scores."""
    products, attend = linears(config, dead), attentions(config, dead)
    backward = sum(item.backward for item in products)
    backward += sum(a.backward(fused_vision if a.module == "siglip" else fused_attention) for a in attend)
    return Flops(sum(item.forward for item in products) + sum(a.forward for a in attend), backward)


def flops_by_module(config: ModelConfig, dead: Dead = "skipped") -> dict[str, Flops]:
    """The same, module by module; joint attention counts as gemma's."""
    result = {}
    for module in MODULES:
        products = [item for item in linears(config, dead) if item.module == module]
        attend = [a for a in attentions(config, dead) if a.module == module]
        result[module] = Flops(
            sum(i.forward for i in products) + sum(a.forward for a in attend),
            sum(i.backward for i in products) + sum(a.backward(True) for a in attend),
        )
    return result


BLOCK_MODULES: tuple[str, ...] = ("siglip", "gemma", "expert", "adarms")


def recompute(config: ModelConfig, dead: Dead = "skipped", *, prefix_last: bool = False) -> int:
    """FLOPs per sample that full checkpointing of every block really computes again.

    PyTorch stops recomputing a block once the last tensor that its backward needs exists, so a block's final product is
    not repeated: SigLIP's second MLP product and π0's suffix down projection. Not the prefix's down projection, because
    `Block` finishes the suffix after it, and not π0.5's suffix, because the gate needs it. `prefix_last` is what a
    Block that finished the prefix last would save.
    """
    inside = [i for i in linears(config, dead) if i.module in BLOCK_MODULES and i.name != "patch_embed"]
    total = sum(i.forward for i in inside) + sum(a.forward for a in attentions(config, dead))
    expert = config.action_expert.width
    if config.pi05:  # the final norm's modulation is outside the blocks
        total -= 2 * expert * 3 * expert
    tail = ("fc2",) if config.pi05 else ("fc2", "expert.down")
    if prefix_last:
        tail = ("fc2", "gemma.down")
    return total - sum(i.forward for i in inside if i.name in tail or f"{i.module}.{i.name}" in tail)
