"""The real model run on fake tensors: how many bytes are alive at every moment of a training step, without the memory.

Counts what PyTorch itself allocates, by storage, on one device. Not in it: the CUDA context, cuBLAS and NCCL buffers,
allocator rounding and fragmentation. Sharding over several ranks needs the parallel room and is refused until then.
"""

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piston.config.schema import ModelConfig, require
from piston.planning.activations import Checkpointing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Traced:
    """Bytes alive on the device: at the end of each phase, and the most at any moment of it."""

    state: int  # weights, both moments, EMA
    forward_end: int
    forward_peak: int
    backward_peak: int
    gradients: int
    optimizer_peak: int
    seconds: float | int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak, self.optimizer_peak)


def trace(config: ModelConfig, batch: int, *, checkpointing: Checkpointing, ema: bool, ranks: int = 1) -> Traced:
    """One training step of `batch` samples of the real model under fake tensors, in eager mode.

    Raises ValueError for more than one rank: the code that would shard the model does not exist yet.
    """
    require(
        ranks == 1,
        f"--trace was asked for {ranks} sharded ranks, it can do 1: the parallel room that shards the model is not "
        "built yet; trace without sharding (--sharding none), or use the analytic figures",
    )
    require(batch >= 1, f"trace batch is {batch}; it must be 1 or more samples per GPU: give --batch")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from piston.model.attention import rope_angles
    from piston.model.pi0 import Pi0, time_embedding

    started = time.perf_counter()
    rope_angles(torch.zeros(1, 1, dtype=torch.int32), config.paligemma.head_dim)  # caches real constants before
    time_embedding(torch.zeros(1), config.action_expert.width)  # fake ones could take their place
    with FakeTensorMode(allow_non_fake_inputs=True), attention_as_on_a_gpu():
        model = Pi0(config)
        live = _Live()
        extra = [torch.empty_like(p) for p in model.parameters() for _ in range(3 if ema else 2)]
        for tensor in (*model.parameters(), *extra):
            live.watch(tensor)
        if checkpointing != "none":
            _checkpoint(model, every=1 if checkpointing == "full" else 2)
        return _step(model, config, batch, live, extra, started)


@contextlib.contextmanager
def attention_as_on_a_gpu() -> Iterator[None]:
    """Sends the model's CPU-only spelled-out attention to the fused kernel that it uses on a GPU."""
    from unittest import mock

    import torch.nn.functional as F

    def fused(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=1.0, enable_gqa=True)
        return out.transpose(1, 2)

    with mock.patch("piston.model.attention._attend_rounded", fused):
        yield


def _step(
    model: Any, config: ModelConfig, batch: int, live: "_Live", extra: "list[torch.Tensor]", started: float | int
) -> Traced:
    from piston.model.flow import flow_loss

    state = live.now
    with live:
        observation, actions, noise, flow_time = _inputs(config, batch)
        loss = flow_loss(model, observation, actions, noise, flow_time).mean()
        forward_end, forward_peak = live.now, live.restart()
        loss.backward()
        del loss
        backward_peak = live.restart()
        gradients = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
        optimizer_peak = live.restart()  # a fused update allocates nothing
    return Traced(
        state, forward_end, forward_peak, backward_peak, gradients, optimizer_peak, time.perf_counter() - started
    )


def _inputs(config: ModelConfig, batch: int) -> tuple[Any, ...]:
    import torch

    from piston.batch import Observation

    cameras, (height, width) = len(config.cameras), config.image_size
    observation = Observation(
        images=torch.empty(batch, cameras, height, width, 3),
        image_masks=torch.ones(batch, cameras, dtype=torch.bool),
        state=torch.empty(batch, config.action_dim),
        tokenized_prompt=torch.zeros(batch, config.max_token_len, dtype=torch.int32),
        tokenized_prompt_mask=torch.ones(batch, config.max_token_len, dtype=torch.bool),
    )
    actions, noise = (torch.empty(batch, config.action_horizon, config.action_dim) for _ in range(2))
    return observation, actions, noise, torch.empty(batch)


def _checkpoint(model: Any, every: int) -> None:
    """Recomputes every `every`-th block in backward, without reentrant autograd."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    for block in model.blocks()[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _live_mode() -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


class _Live:
    """Bytes of all storages alive, with a running maximum; a context manager that sees every operation."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._seen: set[int] = set()
        self._mode: Any = None

    def watch(self, tensor: "torch.Tensor") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def restart(self) -> int:
        """The maximum since the last restart."""
        most, self.most = self.most, self.now
        return most

    def __enter__(self) -> "_Live":
        import torch
        from torch.utils._pytree import tree_leaves

        live = self

        class Watch(_live_mode()):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        live.watch(leaf)
                return result

        self._mode = Watch()
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
