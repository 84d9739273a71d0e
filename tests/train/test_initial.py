"""Training starts from other weights: all of them, or all but what is listed; anything else is refused."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from piston.config.schema import RunConfig
from piston.convert.convert import Target, convert
from piston.model.pi0 import Pi0
from piston.train import loop
from piston.train.checkpoint import open_checkpoint
from piston.train.initial import load_initial
from piston.weights.links import paligemma_links

MakeRun = Callable[..., RunConfig]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=400)


def said(console: Console) -> str:
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def trained(make_run: MakeRun) -> tuple[RunConfig, Path]:
    run = make_run(num_train_steps=1, exp_name="first")
    return run, loop.train(run, quiet()).checkpoint


def start_from(run: RunConfig, path: Path, *fresh: str) -> tuple[Pi0, str]:
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, init=path, init_except=fresh))
    model, console = Pi0.build(run.model, device="cpu", seed=11), quiet()
    load_initial(model, run, console)
    return model, said(console)


@pytest.mark.parametrize("to", ["openpi-jax", "openpi-pytorch", "lerobot", "piston"])
def test_from_every_layout_through_the_loop(make_run: MakeRun, tmp_path: Path, to: Target) -> None:
    _, checkpoint = trained(make_run)
    convert(checkpoint, tmp_path / to, to)
    run = make_run(num_train_steps=1, exp_name="second", init=tmp_path / to, peak_lr=1e-30, ema_decay=None)
    console = quiet()
    second = loop.train(run, console)
    assert f"started from {tmp_path / to} ({to})" in said(console)
    ours, theirs = open_checkpoint(second.checkpoint).tensors("model"), open_checkpoint(checkpoint).tensors("ema")
    for name, parameter in ours.items():  # updates of 1e-30 are none
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-25)


def test_another_action_dimension_needs_a_list(make_run: MakeRun) -> None:
    run, checkpoint = trained(make_run)
    wider = dataclasses.replace(run, model=dataclasses.replace(run.model, action_dim=9))
    with pytest.raises(ValueError, match=r"(?s)3 parameters differ.*action_in_proj\.weight is \(16, 6\).*\(16, 9\)"):
        start_from(wider, checkpoint)
    model, text = start_from(wider, checkpoint, "action_in_proj", "action_out_proj")
    fresh = Pi0.build(wider.model, device="cpu", seed=11)
    theirs = open_checkpoint(checkpoint).tensors("ema")
    for name, parameter in model.named_parameters():
        expected = dict(fresh.named_parameters())[name] if name.startswith("action") else theirs[name]
        assert torch.equal(parameter, expected), name
    assert "as initialised: 4 parameters: action_in_proj.bias" in text


def test_a_list_must_name_something(make_run: MakeRun) -> None:
    run, checkpoint = trained(make_run)
    with pytest.raises(ValueError, match="'action_in', which names no parameter"):
        start_from(run, checkpoint, "action_in")
    with pytest.raises(ValueError, match=r"without train\.init"):
        make_run(init_except=("heads",))


def test_pi0_is_not_taken_for_pi05(make_run: MakeRun) -> None:
    run, checkpoint = trained(make_run)
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, pi05=False, discrete_state_input=False))
    with pytest.raises(ValueError, match=r"(?s)missing state_proj\.weight.*unexpected time_mlp_in"):
        start_from(other, checkpoint)
    model, text = start_from(other, checkpoint, "expert", "heads")
    assert "in the checkpoint but not in the model" in text
    assert torch.equal(model.siglip.head.weight, open_checkpoint(checkpoint).tensors("ema")["siglip.head.weight"])


def test_from_paligemma_alone(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    state = {n: torch.randn(p.shape) for n, p in Pi0.build(run.model, device="cpu", seed=0).state_dict().items()}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for link in paligemma_links(run.model):
        (name, layer), (array,) = link.theirs[0], link.to_theirs([state[link.ours[0]]])
        stacked.setdefault(name, {})[layer if layer is not None else -1] = array.numpy()
    arrays = {n: v[-1] if -1 in v else np.stack([v[i] for i in range(len(v))]) for n, v in stacked.items()}
    np.savez(tmp_path / "pt_28.npz", allow_pickle=False, **arrays)
    with pytest.raises(ValueError, match=r"missing gemma\.suffix_norm"):
        start_from(run, tmp_path / "pt_28.npz")
    model, text = start_from(run, tmp_path / "pt_28.npz", "expert", "heads")
    fresh = dict(Pi0.build(run.model, device="cpu", seed=11).named_parameters())
    for name, parameter in model.named_parameters():
        taken = name.startswith(("siglip.", "gemma.")) and "suffix" not in name
        assert torch.equal(parameter, state[name] if taken else fresh[name]), name
    assert "(paligemma)" in text
    with pytest.raises(ValueError, match="PaliGemma alone"):
        convert(tmp_path / "pt_28.npz", tmp_path / "a", "piston")
    np.savez(tmp_path / "o.npz", allow_pickle=True, thing=np.array([{}], dtype=object), **arrays)
    with pytest.raises(ValueError, match="is a pickled file"):
        start_from(run, tmp_path / "o.npz", "expert", "heads")


def test_adapters_may_be_missing(make_run: MakeRun) -> None:
    from piston.config.schema import LoraConfig

    run, checkpoint = trained(make_run)
    vlm = dataclasses.replace(run.model.paligemma, lora_attn=LoraConfig(2, 2.0))
    model, text = start_from(dataclasses.replace(run, model=dataclasses.replace(run.model, paligemma=vlm)), checkpoint)
    assert "as initialised: 12 parameters: gemma.blocks.*.prefix.kv.lora.a" in text
    assert dict(model.named_parameters())["gemma.blocks.0.prefix.q.lora.a"].any()
