"""Task text, and for π0.5 the state in 256 bins, → token ids of fixed length, exactly as openpi makes them.

Text formats and bins: openpi models/tokenizer.py `PaligemmaTokenizer`. Any sentencepiece `.model` or Hugging Face
`tokenizer.json` will do, found out from the file's content; the begin-of-sequence token is put first by us, whatever
post-processing a tokenizer.json asks for.
"""

import json
import logging
from importlib import resources
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import sentencepiece
import tokenizers
from jaxtyping import Bool, Float, Int32, Int64

from piston.config.schema import SHIPPED_TOKENIZER

PAD_ID = 0  # PaliGemma's, and masked anyway
BIN_EDGES = np.linspace(-1, 1, 257)[:-1]
BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "[BOS]", "[CLS]")  # of a tokenizer.json, by preference
WHERE = "openpi's public file is gs://big_vision/paligemma_tokenizer.model: download it and pass --data.tokenizer PATH"

log = logging.getLogger(__name__)
_truncated: dict[int, int] = {}  # max_len → prompts cut in this process


@runtime_checkable
class Tokenizer(Protocol):
    """What a prompt needs from a tokenizer. Implementations can be pickled to loader processes."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def bos_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without begin or end."""
        ...


class SentencePiece:
    """A sentencepiece model, from the bytes of its file."""

    def __init__(self, model: bytes) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self.processor.get_piece_size()
        self.bos_id: int = self.processor.bos_id()

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)


class FastTokenizer:
    """A Hugging Face tokenizer.json, from its text. `vocab_size` leaves out tokens added on top of the vocabulary."""

    def __init__(self, text: str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_str(text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size: int = self.tokenizer.get_vocab_size(with_added_tokens=False)
        begin = (self.tokenizer.token_to_id(name) for name in BOS_NAMES)
        self.bos_id: int = next((token for token in begin if token is not None), -1)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer in a file; the path `shipped` means Piston's own small one.

    Raises ValueError for a missing path, a missing file, a file of another kind, and a tokenizer without a
    begin-of-sequence token.
    """
    if path is None:
        raise ValueError(
            "no tokenizer is given (data.tokenizer is None); expected the path of a sentencepiece .model or a "
            f"tokenizer.json. {WHERE}; a model trained from scratch can use `--data.tokenizer shipped`"
        )
    if path == SHIPPED_TOKENIZER:
        return SentencePiece((resources.files("piston") / "assets" / "small.model").read_bytes())
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(
            f"tokenizer file {path} {what}; expected a sentencepiece .model or a tokenizer.json "
            f"(config field data.tokenizer). {WHERE}"
        )
    content = path.read_bytes()
    is_json = content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
    tokenizer = _from_json(path, content) if is_json else _from_sentencepiece(path, content)
    if tokenizer.bos_id < 0:
        raise ValueError(
            f"tokenizer file {path} has no begin-of-sequence token; expected one, since every prompt starts with it "
            f"(PaliGemma: <bos>, id 2; names looked for in a tokenizer.json: {', '.join(BOS_NAMES)}). {WHERE}"
        )
    return tokenizer


def _from_sentencepiece(path: Path, content: bytes) -> Tokenizer:
    try:
        tokenizer = SentencePiece(content)
    except RuntimeError as error:
        raise _not_a_tokenizer(path, content) from error
    if tokenizer.vocab_size == 0:  # an empty file parses as an empty model
        raise _not_a_tokenizer(path, content)
    return tokenizer


def _from_json(path: Path, content: bytes) -> Tokenizer:
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise _not_a_tokenizer(path, content) from error
    if not isinstance(values.get("model"), dict):
        raise _not_a_tokenizer(path, content)
    try:
        return FastTokenizer(json.dumps(values))
    except Exception as error:  # tokenizers raises Exception itself for every fault of the file
        raise _not_a_tokenizer(path, content) from error


def _not_a_tokenizer(path: Path, content: bytes) -> ValueError:
    if content.startswith(b"version https://git-lfs"):
        found = "a git-lfs pointer, not the file itself (run `git lfs pull`)"
    else:
        found = f"{len(content)} bytes starting with {content[:24]!r}" if content else "an empty file"
    return ValueError(
        f"tokenizer file {path} cannot be read: it is {found}; expected a sentencepiece .model or a complete "
        f"tokenizer.json (config field data.tokenizer). {WHERE}"
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer makes ids that the model has no embedding for; call it before training.

    A smaller vocabulary is logged: right for a model from scratch, wrong for pretrained weights.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} pieces, the model embeds {vocab_size} (model.vocab_size); "
            "expected at most as many: raise --model.vocab-size to train from scratch, or pass PaliGemma's tokenizer "
            f"for pretrained weights. {WHERE}"
        )
    if tokenizer.vocab_size < vocab_size:
        log.warning(
            "the tokenizer has %d pieces, the model embeds %d: fine for a model trained from scratch, but not the "
            "tokenizer of pretrained weights with that vocabulary",
            tokenizer.vocab_size,
            vocab_size,
        )


def discretize_state(state_S: Float[np.ndarray, "S"]) -> Int64[np.ndarray, "S"]:
    """Bins of a normalised state: 256 left-closed ones over [-1, 1), −1 below, 255 from 127/128 up; no clipping.

    NaN would land in bin 255 without a word: check first.
    """
    return (np.digitize(state_S, BIN_EDGES) - 1).astype(np.int64)


def clean_prompt(prompt: str) -> str:
    """Ends stripped, then underscores and line breaks become spaces; capitals stay."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def prompt_ids(tokenizer: Tokenizer, prompt: str, state_S: Float[np.ndarray, "S"] | None) -> list[int]:
    """All ids of a prompt, begin-of-sequence first. A state is normalised and not yet padded.

    Without a state the line break is tokenised on its own; with one the text ends in "Action: ", space included.
    """
    text = clean_prompt(prompt)
    if state_S is None:
        return [tokenizer.bos_id, *tokenizer.encode(text), *tokenizer.encode("\n")]
    bins = " ".join(map(str, discretize_state(state_S).tolist()))
    return [tokenizer.bos_id, *tokenizer.encode(f"Task: {text}, State: {bins};\nAction: ")]


def tokenize(
    tokenizer: Tokenizer, prompt: str, state_S: Float[np.ndarray, "S"] | None, max_len: int
) -> tuple[Int32[np.ndarray, "L"], Bool[np.ndarray, "L"]]:
    """Ids padded with 0 to `max_len`, and which of them are real. A longer prompt is cut at its end, with a warning."""
    ids = prompt_ids(tokenizer, prompt, state_S)
    if len(ids) > max_len:
        _warn_truncated(len(ids), max_len, prompt)
    tokens, mask = np.full(max_len, PAD_ID, np.int32), np.arange(max_len) < len(ids)
    tokens[: len(ids)] = ids[:max_len]
    return tokens, mask


def truncated_prompts() -> int:
    """How many prompts this process has cut so far."""
    return sum(_truncated.values())


def _warn_truncated(length: int, max_len: int, prompt: str) -> None:
    """Once per length limit and process: a data set of long prompts would say it a million times."""
    if max_len not in _truncated:
        log.warning(
            "a prompt has %d tokens, %d are kept (model.max_token_len): its end is cut off, and so will be that of "
            "every prompt as long, without another warning; raise --model.max-token-len. Prompt: %.200r",
            length,
            max_len,
            prompt,
        )
    _truncated[max_len] = _truncated.get(max_len, 0) + 1
