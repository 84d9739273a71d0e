"""Prompts: text, bins, padding and truncation as in openpi, with sentencepiece and tokenizer.json files alike."""

import json
import logging
import math
import os
import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from piston.config.recipes import SHIPPED_VOCAB_SIZE
from piston.config.schema import SHIPPED_TOKENIZER
from piston.data import prompt as room
from piston.data.prompt import (
    Tokenizer,
    check_vocabulary,
    clean_prompt,
    discretize_state,
    load_tokenizer,
    prompt_ids,
    tokenize,
    truncated_prompts,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = json.loads((GOLDEN / "preprocess_transforms.json").read_text())[
    "tokenizer_cases (fake sentencepiece: token = ord(char), bos = 2)"
]
GEMMA_ROWS = json.loads((GOLDEN / "gemma_prompt_ids.json").read_text())["rows"]
PALIGEMMA = os.environ.get("PISTON_PALIGEMMA_TOKENIZER")


class Characters:
    """The stand-in with which the golden cases were made: an id is a character's code; texts are written down."""

    vocab_size = 0x110000
    bos_id = 2

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(character) for character in text]


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return load_tokenizer(SHIPPED_TOKENIZER)


def json_tokenizer(path: Path, *, bos: str | None = "<bos>", words: tuple[str, ...] = ("reach", "block")) -> Path:
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *([bos] if bos else []), "<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A {bos}", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("case", CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_equals_openpi(case: dict) -> None:
    tokenizer = Characters()
    state = None if case["state"] is None else np.asarray(case["state"], case["state_dtype"])
    tokens, mask = tokenize(tokenizer, case["prompt"], state, case["max_len"])
    assert tokenizer.texts == case["encode_calls"]
    assert tokens.tolist() == case["tokens"]
    assert mask.tolist() == case["mask"]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bins_equal_openpi(dtype: str) -> None:
    golden = np.load(GOLDEN / "preprocess_transforms.npz")
    assert np.array_equal(discretize_state(golden[f"discretize/{dtype}_in"]), golden[f"discretize/{dtype}_out"])


@pytest.mark.parametrize("row", [row for row in GEMMA_ROWS if row["kind"] == "state"], ids=lambda row: row["prompt"])
def test_text_and_bins_of_real_prompts(row: dict) -> None:
    tokenizer = Characters()
    state = np.asarray(row["state"], np.float32)
    assert discretize_state(state).tolist() == row["bins"]
    prompt_ids(tokenizer, row["prompt"], state)
    assert tokenizer.texts == [row["text"]]


@pytest.mark.skipif(not PALIGEMMA, reason="PISTON_PALIGEMMA_TOKENIZER does not point to PaliGemma's tokenizer")
@pytest.mark.parametrize("row", GEMMA_ROWS, ids=lambda row: f"{row['kind']}: {row['prompt']}")
def test_ids_of_real_prompts(row: dict) -> None:
    tokenizer = load_tokenizer(Path(PALIGEMMA or ""))
    state = np.asarray(row["state"], np.float32) if row["kind"] == "state" else None
    assert prompt_ids(tokenizer, row["prompt"], state) == row["ids"]


@given(st.floats(-1.5, 1.5))
def test_bin_holds_its_value(value: float) -> None:
    (bin_,) = discretize_state(np.array([value])).tolist()
    assert bin_ == max(-1, min(255, math.floor(value * 128) + 128))


def test_nothing_is_lost_but_ends_underscores_and_breaks() -> None:
    assert clean_prompt("  Pick_up\nthe Cup \n") == "Pick up the Cup"
    assert clean_prompt("") == clean_prompt(" \n\t") == ""


@given(text=st.text(max_size=40), max_len=st.integers(1, 30), with_state=st.booleans())
def test_layout_for_any_text(text: str, max_len: int, with_state: bool) -> None:
    state = np.array([0.1, -0.7]) if with_state else None
    ids = prompt_ids(Characters(), text, state)
    tokens, mask = tokenize(Characters(), text, state, max_len)
    kept = min(len(ids), max_len)
    assert tokens[:kept].tolist() == ids[:kept]
    assert not tokens[kept:].any()
    assert mask.tolist() == [True] * kept + [False] * (max_len - kept)


def test_long_prompts_warn_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_truncated", {})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tokenize(Characters(), "twelve chars", None, 10)
        tokenize(Characters(), "fits", None, 10)
    assert truncated_prompts() == 3
    (record,) = caplog.records
    assert "14 tokens, 10 are kept" in record.getMessage()


def test_shipped_tokenizer_spends_one_token_per_number(shipped: Tokenizer) -> None:
    for number in range(-1, 256):
        assert len(shipped.encode(f"State: {number};")) == len(shipped.encode("State:;")) + 1
    ids = prompt_ids(shipped, "reach the red block", np.zeros(5))
    assert len(ids) <= 20
    assert ids[0] == shipped.bos_id == 2
    assert shipped.vocab_size == SHIPPED_VOCAB_SIZE


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="\u2581\x00"), max_size=50))
def test_shipped_tokenizer_loses_no_text(text: str) -> None:
    processor = load_tokenizer(SHIPPED_TOKENIZER).processor  # type: ignore[attr-defined]
    assert processor.decode(processor.encode(text)) == text


def test_shipped_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_tokenizer.py"))
    script["make"](tmp_path / "again.model")
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    stored = sentencepiece.SentencePieceProcessor(model_file=str(script["OUT"]))
    pieces = [[p.id_to_piece(i) for i in range(p.get_piece_size())] for p in (again, stored)]
    assert pieces[0] == pieces[1]


def test_tokenizer_json_gets_our_begin_token_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(json_tokenizer(tmp_path / "tokenizer.json"))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (2, 6)
    assert tokenizer.encode("reach block reach") == [4, 5, 4]
    tokens, mask = tokenize(tokenizer, "reach block", None, 5)
    assert tokens.tolist() == [2, 4, 5, 0, 0]
    assert mask.tolist() == [True, True, True, False, False]


def test_kind_is_found_from_content(tmp_path: Path, shipped: Tokenizer) -> None:
    disguised = tmp_path / "tokenizer.json"
    disguised.write_bytes((ROOT / "src/piston/assets/small.model").read_bytes())
    assert load_tokenizer(disguised).encode("reach") == shipped.encode("reach")
    renamed = json_tokenizer(tmp_path / "t.json").rename(tmp_path / "other.model")
    renamed.write_bytes(b"\xef\xbb\xbf\n " + renamed.read_bytes())
    assert load_tokenizer(renamed).encode("block") == [5]


def test_tokenizers_travel_to_loader_processes(tmp_path: Path, shipped: Tokenizer) -> None:
    for tokenizer in (shipped, load_tokenizer(json_tokenizer(tmp_path / "tokenizer.json"))):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode("reach block") == tokenizer.encode("reach block")
        assert (copy.bos_id, copy.vocab_size) == (tokenizer.bos_id, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git-lfs pointer"),
        (b'{"model_type": "gemma"}', "model_type"),
        (b'{"model": {"type": "BPE"}}', "bytes starting with"),
        (b'{"model": ', "bytes starting with"),
        (b"PK\x03\x04 something else", "bytes starting with"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"gs://big_vision/paligemma_tokenizer\.model") as caught:
        load_tokenizer(path)
    for part in (str(path), found, "expected", "data.tokenizer"):
        assert part in str(caught.value)


def test_truncated_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.model"
    path.write_bytes((ROOT / "src/piston/assets/small.model").read_bytes()[:9000])
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(path)


def test_missing_paths_say_where_to_get_the_file(tmp_path: Path) -> None:
    for path, message in ((None, "shipped"), (tmp_path / "no.model", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(path)
        assert "gs://big_vision/paligemma_tokenizer.model" in str(caught.value)


def test_a_tokenizer_without_begin_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no begin-of-sequence token"):
        load_tokenizer(json_tokenizer(tmp_path / "tokenizer.json", bos=None))


def test_vocabulary_must_fit_the_model(shipped: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    check_vocabulary(shipped, SHIPPED_VOCAB_SIZE)
    assert not caplog.records
    check_vocabulary(shipped, 257_152)
    assert "1024 pieces" in caplog.text
    with pytest.raises(ValueError, match=r"1024 pieces.*embeds 512"):
        check_vocabulary(shipped, 512)
