"""Round trips between all layouts lose nothing; broken checkpoints are refused and leave nothing behind."""

import io
import itertools
import json
import os
import pickle
import platform
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from piston.config.schema import RunConfig
from piston.convert import convert as convert_module
from piston.convert import write as write_module
from piston.convert.convert import convert, convert_command
from piston.convert.extras import Given
from piston.data.norm import KeyStats, load_norm_stats, save_norm_stats
from piston.model.pi0 import Pi0
from piston.train.checkpoint import load_policy_weights, open_checkpoint
from piston.weights.links import EMBEDDING, LAYOUTS, TIED_HEAD, UNUSED_HEAD, rlinf_links
from piston.weights.merge import without_lora
from piston.weights.opened import open_weights

Make = Callable[..., tuple[Path, dict[str, Tensor], RunConfig]]
Target = Literal["openpi-jax", "openpi-pytorch", "lerobot", "piston"]
TARGETS: tuple[Target, ...] = ("openpi-jax", "openpi-pytorch", "lerobot", "piston")


def state_of(path: Path) -> dict[str, Tensor]:
    weights = open_weights(path)
    return {name: weights.read(name) for name in weights.links}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    wrong = [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])]
    assert wrong == []


# --- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pi05", [False, True])
def test_there_and_back(make: Make, tmp_path: Path, pi05: bool) -> None:
    """A walk that goes from every layout to every other, and to itself."""
    source, state, run = make(pi05=pi05)
    walk = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0]
    assert len(set(itertools.pairwise(walk))) == len(TARGETS) ** 2
    for number, to in enumerate(walk):
        result = convert(source, tmp_path / str(number), TARGETS[to])
        source = tmp_path / str(number)
        assert result.source.config == run.model
    convert(source, tmp_path / "last", "piston")
    assert_same(state_of(tmp_path / "last"), state)
    assert open_checkpoint(tmp_path / "last").run.data.robot == run.data.robot


@pytest.mark.parametrize("to", TARGETS)
def test_bfloat16_stays_bfloat16(make: Make, tmp_path: Path, to: Target) -> None:
    source, state, _ = make(dtype=torch.bfloat16)
    convert(source, tmp_path / "a", to)
    assert_same(state_of(tmp_path / "a"), state)


@pytest.mark.parametrize("to", TARGETS)
def test_dtype_is_changed_only_when_asked(make: Make, tmp_path: Path, to: Target) -> None:
    source, state, _ = make()
    convert(source, tmp_path / "a", to, dtype="bfloat16")
    assert_same(state_of(tmp_path / "a"), {name: t.bfloat16() for name, t in state.items()})


def test_mixed_dtypes_survive(make: Make, tmp_path: Path) -> None:
    # As openpi's PyTorch port stores them: bfloat16 with some float32.
    source, state, run = make()
    mixed = {n: t if "norm" in n or "patch" in n else t.bfloat16() for n, t in state.items()}
    save_file(mixed, source, metadata=dict(open_weights(source).files.metadata))
    for to in TARGETS:
        convert(source, tmp_path / to, to)
        assert_same(state_of(tmp_path / to), mixed)
    assert run.model.pi05


def test_sizes_come_from_shapes_alone(make: Make, tmp_path: Path) -> None:
    """Without Piston's own header: what no tensor tells is said to be a guess."""
    source, _, run = make(pi05=False, lora=True)
    convert(source, tmp_path / "a", "openpi-jax")
    metadata = tmp_path / "a" / "params" / "_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"custom_metadata": None}))
    weights = open_weights(tmp_path / "a")
    assert weights.run is None
    for name in ("pi05", "siglip", "vocab_size", "image_size", "action_dim"):
        assert getattr(weights.config, name) == getattr(run.model, name)
    assert weights.config.paligemma.lora_ffn == run.model.paligemma.lora_ffn
    assert set(weights.guessed) >= {"action_horizon", "lora_attn.alpha", "expert_lora_ffn.alpha"}
    assert open_weights(tmp_path / "a", like=run.model).config == run.model


def test_training_checkpoints_of_openpi_end_with_value(make: Make, tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    source, state, _ = make()
    convert(source, tmp_path / "a", "openpi-jax")
    directory = tmp_path / "a" / "params"
    content = json.loads((directory / "_METADATA").read_text())
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{directory}/"}).result()
    for key in store.list().result():
        name, _, part = key.decode().partition("/")
        store.write(f"{name}.value/{part}", store.read(key).result().value).result()
        store.delete_range(tensorstore.KvStore.KeyRange(key, key + b"\0")).result()
    for leaf in content["tree_metadata"].values():
        leaf["key_metadata"].append({"key": "value", "key_type": 2})
    (directory / "_METADATA").write_text(json.dumps(content))
    assert_same(state_of(directory), state)


def write_rlinf(path: Path, state: dict[str, Tensor], run: RunConfig) -> None:
    tensors: dict[str, Tensor] = {}
    for link in rlinf_links(run.model):
        pieces = link.to_theirs([state[name] for name in link.ours])
        tensors.update({name: t.contiguous() for (name, _), t in zip(link.theirs, pieces, strict=True)})
    save_file(tensors, path)


@pytest.mark.parametrize("pi05", [False, True])
def test_rlinf_is_read(make: Make, tmp_path: Path, pi05: bool) -> None:
    _, state, run = make(pi05=pi05)
    write_rlinf(tmp_path / "r.safetensors", state, run)
    names = load_file(tmp_path / "r.safetensors")
    assert names["llm.layers.1.mlps.1.w_gating"].shape == (2, 20, 24)
    assert names["img.encoder.layers.0.attn.in_proj_weight"].shape == (90, 30)
    convert(tmp_path / "r.safetensors", tmp_path / "c", "piston", given=Given(run=run))
    assert_same(state_of(tmp_path / "c"), state)


def test_ema_comes_first_and_raw_on_request(make: Make, tmp_path: Path) -> None:
    source, state, _ = make()
    convert(source, tmp_path / "a", "piston")
    average = {name: t + 1 for name, t in state.items() if name.startswith("action")}
    save_file(average, tmp_path / "a" / "ema.safetensors")
    assert_same(state_of(tmp_path / "a"), state | average)
    raw = open_weights(tmp_path / "a", raw=True)
    assert torch.equal(raw.read("action_in_proj.bias"), state["action_in_proj.bias"])
    convert(source, tmp_path / "b", "lerobot")
    with pytest.raises(ValueError, match="leave --raw out"):
        open_weights(tmp_path / "b", raw=True)


def test_a_converted_checkpoint_is_whole(make: Make, tmp_path: Path) -> None:
    source, state, run = make()
    convert(source, tmp_path / "a", "piston")
    assert open_checkpoint(tmp_path / "a").run == run
    assert_same(load_policy_weights(tmp_path / "a"), state)


def test_shards(make: Make, tmp_path: Path) -> None:
    source, state, run = make()
    convert(source, tmp_path / "a", "lerobot")
    whole = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "model.safetensors").unlink()
    index = {}
    for i, names in enumerate((sorted(whole)[::2], sorted(whole)[1::2])):
        save_file({name: whole[name] for name in names}, tmp_path / "a" / f"model-{i}.safetensors")
        index |= dict.fromkeys(names, f"model-{i}.safetensors")
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = open_weights(tmp_path / "a", like=run.model)
    assert_same({name: weights.read(name) for name in weights.links}, state)
    (tmp_path / "a" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors, which the checkpoint names"):
        open_weights(tmp_path / "a")


def change(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrites model.safetensors with other tensors; the header stays."""
    file = path / "model.safetensors"
    metadata = dict(open_weights(path).files.metadata)
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata=metadata)


@pytest.mark.parametrize("to", ["openpi-pytorch", "lerobot"])
def test_the_embedding_under_any_of_its_names(make: Make, tmp_path: Path, to: Target) -> None:
    source, state, _ = make()
    convert(source, tmp_path / "a", to)
    prefix = "model." if to == "lerobot" else ""
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert prefix + TIED_HEAD in stored
    assert prefix + EMBEDDING not in stored
    assert not stored[prefix + UNUSED_HEAD].any(), "the unused head is there, for strict loaders, and zero"
    change(tmp_path / "a", lambda t: t.update({prefix + EMBEDDING: t[prefix + TIED_HEAD].clone()}))
    assert_same(state_of(tmp_path / "a"), state)
    change(tmp_path / "a", lambda t: t.pop(prefix + TIED_HEAD))
    change(tmp_path / "a", lambda t: t.pop(prefix + UNUSED_HEAD))
    assert_same(state_of(tmp_path / "a"), state)


# --- what travels along ----------------------------------------------------------------------------------------------


def some_stats() -> dict[str, KeyStats]:
    rows = np.linspace(-1, 1, 16).reshape(4, 4)
    state = KeyStats(mean=rows[0], std=rows[3], q01=rows[1], q99=rows[2])
    return {"state": state, "actions": KeyStats(*(row[:3] for row in (rows[0], rows[3], rows[1], rows[2])))}


@pytest.mark.parametrize("via", TARGETS)
def test_statistics_travel(make: Make, tmp_path: Path, via: Target) -> None:
    source, _, _ = make()
    save_norm_stats(tmp_path / "s.json", some_stats())
    convert(source, tmp_path / "a", via, given=Given(stats=tmp_path / "s.json"))
    if via.startswith("openpi"):
        assert (tmp_path / "a" / "assets" / "me" / "tiny" / "norm_stats.json").is_file()
    convert(tmp_path / "a", tmp_path / "b", "piston")
    back = load_norm_stats(tmp_path / "b" / "norm_stats.json")
    for key, stats in some_stats().items():
        for name in ("mean", "std", "q01", "q99"):
            found, expected = getattr(back[key], name), getattr(stats, name)
            if via == "lerobot":  # which keeps float32
                expected = expected.astype(np.float32).astype(np.float64)
            assert np.array_equal(found, expected)


def test_statistics_of_several_robots_need_a_choice(make: Make, tmp_path: Path) -> None:
    source, _, _ = make()
    convert(source, tmp_path / "a", "openpi-pytorch")
    for robot in ("droid", "trossen"):
        save_norm_stats(tmp_path / "a" / "assets" / robot / "norm_stats.json", some_stats())
    with pytest.raises(ValueError, match=r"droid.*trossen.*choose with --asset-id"):
        convert(tmp_path / "a", tmp_path / "b", "piston")
    result = convert(tmp_path / "a", tmp_path / "b", "piston", given=Given(asset_id="droid"))
    assert result.extras.stats is not None


def test_what_a_target_cannot_hold_is_said(make: Make, tmp_path: Path) -> None:
    source, _, _ = make()
    console = Console(file=io.StringIO(), width=300)
    assert convert_command(source, tmp_path / "a", "lerobot", None, False, False, Given(), console) == 0
    output = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "π0.5" in output
    assert "delta actions (2, -1) have no place" in output
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["max_action_dim"]) == ("pi05", 5, 6)
    assert config["input_features"]["observation.images.image"]["shape"] == [3, 28, 14]


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_adapters_survive_where_there_is_place(make: Make, tmp_path: Path) -> None:
    source, state, run = make(lora=True)
    convert(source, tmp_path / "a", "openpi-jax")
    convert(tmp_path / "a", tmp_path / "b", "piston")
    assert_same(state_of(tmp_path / "b"), state)
    assert open_checkpoint(tmp_path / "b").run.model == run.model
    with pytest.raises(ValueError, match="no place for"):
        convert(source, tmp_path / "c", "lerobot")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("pi05", [False, True])
def test_merged_equals_unmerged(make: Make, tmp_path: Path, pi05: bool) -> None:
    source, state, run = make(pi05=pi05, lora=True)
    convert(source, tmp_path / "a", "openpi-pytorch", merge_lora=True)
    weights = open_weights(tmp_path / "a")
    assert weights.config == without_lora(run.model)
    merged = {name: weights.read(name) for name in weights.links}
    assert not torch.equal(merged["gemma.blocks.0.prefix.q.weight"], state["gemma.blocks.0.prefix.q.weight"])
    adapted, plain = Pi0(run.model), Pi0(weights.config)
    adapted.load_state_dict(state)
    plain.load_state_dict(merged)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    y = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))
    for block, folded in zip(adapted.gemma.blocks, plain.gemma.blocks, strict=True):
        for one, other, z in ((block.prefix, folded.prefix, x), (block.suffix, folded.suffix, y)):
            heads = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
            for name, value in (("q", z), ("kv", z), ("gate_up", z), ("o", heads)):
                found, expected = getattr(other, name)(value), getattr(one, name)(value)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
            found, expected = getattr(other, "mlp")(z), getattr(one, "mlp")(z)  # noqa: B009, they are typed as tensors
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


# --- broken ones -----------------------------------------------------------------------------------------------------


def missing_key(path: Path) -> None:
    change(path, lambda t: t.pop("action_out_proj.bias"))


def extra_key(path: Path) -> None:
    change(path, lambda t: t.update(surprise=torch.zeros(2)))


def wrong_shape(path: Path) -> None:
    change(path, lambda t: t.update({"action_out_proj.bias": torch.zeros(7)}))


def wrong_dtype(path: Path) -> None:
    change(path, lambda t: t.update({"action_out_proj.bias": torch.zeros(6, dtype=torch.int8)}))


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def tied_embedding_missing(path: Path) -> None:
    change(path, lambda t: t.pop(TIED_HEAD))


def tied_embedding_differs(path: Path) -> None:
    change(path, lambda t: t.update({EMBEDDING: t[TIED_HEAD] + 1}))


def pi0_given_as_pi05(path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("time_mlp")]:
            tensors["action_" + name] = tensors.pop(name)

    change(path, edit)


def another_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"action_dim": 14}))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(sys.argv[0]).parent / "never",))


def pickled(path: Path) -> None:
    (path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))


def torch_archive(path: Path) -> None:
    with zipfile.ZipFile(path / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))


def only_pickles(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def link_out_of_the_directory(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def huge_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")


def shard_outside(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    index = {"weight_map": {"a": "../model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_another_kind(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("[" * 100_000)


def nothing(path: Path) -> None:
    (path / "model.safetensors").unlink()


BROKEN: dict[Callable[[Path], None], str] = {
    missing_key: r"1 tensors do not fit.*\n  missing action_out_proj\.bias \(6,\)",
    extra_key: r"unexpected surprise \(2,\)",
    wrong_shape: r"shape of action_out_proj\.bias is \(7,\), the model has \(6,\)",
    wrong_dtype: r"dtype of action_out_proj\.bias is I8, expected bfloat16",
    truncated: r"cannot read .*as safetensors",
    tied_embedding_missing: r"missing paligemma_with_expert\.paligemma\.lm_head\.weight",
    tied_embedding_differs: r"differ, expected the same numbers",
    pi0_given_as_pi05: r"looks like π0,(.|\n)*missing state_proj\.weight(.|\n)*unexpected .*input_layernorm\.dense",
    another_config: r"contradicts the weights: action_dim is 14, the tensors have 6",
    pickled: r"is a pickled file",
    torch_archive: r"is a pickled file",
    only_pickles: r"pytorch_model\.bin is a pickled file",
    link_out_of_the_directory: r"outside of the checkpoint",
    huge_header: r"cannot read .*as safetensors",
    shard_outside: r"outside of the checkpoint",
    index_of_another_kind: r"cannot read .*index\.json",
    nothing: r"holds no weights",
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.__name__)
def test_broken_checkpoints_are_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None]
) -> None:
    source, _, _ = make()
    convert(source, tmp_path / "a", "openpi-pytorch")
    fault(tmp_path / "a")

    def unpickled(*args: object, **kwargs: object) -> None:
        raise AssertionError("a pickle was loaded")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, unpickled)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=BROKEN[fault]):
        convert(tmp_path / "a", tmp_path / "b", "piston")
    assert sorted(tmp_path.iterdir()) == before, "something was left behind"


def test_a_broken_jax_checkpoint(make: Make, tmp_path: Path) -> None:
    source, _, _ = make()
    convert(source, tmp_path / "a", "openpi-jax")
    data = max((tmp_path / "a" / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot read array"):
        convert(tmp_path / "a", tmp_path / "b", "piston")
    assert not (tmp_path / "b").exists()
    metadata = tmp_path / "a" / "params" / "_METADATA"
    content = json.loads(metadata.read_text())
    content["tree_metadata"].pop("('params', 'action_out_proj', 'bias')")
    metadata.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"missing action_out_proj/bias \(6,\)"):
        open_weights(tmp_path / "a")


def test_links_of_a_hugging_face_cache_are_normal(make: Make, tmp_path: Path) -> None:
    source, state, _ = make()
    snapshot = tmp_path / "models--me--pi05" / "snapshots" / "abc"
    convert(source, snapshot, "lerobot")
    (tmp_path / "models--me--pi05" / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(tmp_path / "models--me--pi05" / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert_same(state_of(snapshot), state)


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = make()
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="nothing is ever overwritten"):
        convert(source, tmp_path / "there", "piston")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_module, "_write_extras", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="No space left on device; nothing of it is left"):
        convert(source, tmp_path / "new", "piston")
    assert sorted(tmp_path.iterdir()) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from piston.convert import convert
def kill(*args): os.kill(os.getpid(), signal.SIGKILL)
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], progress=lambda done, total: done == 20 and kill())
"""


@pytest.mark.parametrize("to", ["openpi-jax", "lerobot"])
def test_a_killed_conversion_is_started_again(make: Make, tmp_path: Path, to: Target) -> None:
    source, state, _ = make()
    killed = subprocess.run([sys.executable, "-c", KILLED, source, tmp_path / "a", to], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (tmp_path / "a").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".a."))
    alive = left.with_name(f".a.{platform.node()}.{os.getpid()}.tmp")
    elsewhere = left.with_name(".a.elsewhere.1.tmp")
    for path in (alive, elsewhere):
        path.mkdir()
    if to == "lerobot":  # this process' own place is taken: nothing is touched
        with pytest.raises(ValueError, match="cannot write"):
            convert(source, tmp_path / "a", to)
    elsewhere_first = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".a."))
    assert elsewhere.name in elsewhere_first
    shutil.rmtree(alive, ignore_errors=True)
    convert(source, tmp_path / "a", to)
    assert not left.exists()
    assert elsewhere.exists(), "another machine's may be alive"
    assert_same(state_of(tmp_path / "a"), state)


def test_arrays_are_written_in_pieces(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_module, "CHUNK_BYTES", 300)
    source, state, _ = make()
    convert(source, tmp_path / "a", "openpi-jax")
    assert_same(state_of(tmp_path / "a"), state)


def test_a_file_that_shrinks_is_noticed(make: Make, tmp_path: Path) -> None:
    source, _, _ = make()
    convert(source, tmp_path / "a", "openpi-pytorch")
    weights = open_weights(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="it was cut off after it was opened"):
        _ = [weights.read(name) for name in weights.links]


def test_the_missing_extra_is_named(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, _ = make()
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ValueError, match=r"pip install 'piston\[jax\]'"):
        convert(source, tmp_path / "a", "openpi-jax")
    assert not (tmp_path / "a").exists()


def test_a_recipe_must_have_the_sizes_of_the_weights(make: Make, tmp_path: Path) -> None:
    source, _, run = make()
    other = RunConfig(run.name, Pi0.on_meta(run.model).config.__class__(), run.data)
    with pytest.raises(ValueError, match="does not fit"):
        convert(source, tmp_path / "a", "piston", given=Given(run=other))


def test_every_layout_has_every_parameter_once(make: Make) -> None:
    _, state, run = make()
    for name, links in LAYOUTS.items():
        covered = [ours for link in links(run.model) for ours in link.ours]
        assert len(covered) == len(set(covered)), name
        assert name == "paligemma" or set(covered) == set(state), name
