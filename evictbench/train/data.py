"""Texts to train on: read from files, the hub or a policy's own maker, and cut into blocks of tokens."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import hub
from evictbench.errors import UserError, first_line
from evictbench.store.files import saving, write_json
from evictbench.suite.datasets import hub_cache_only, read

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")

CALCULATION = re.compile(r"<<[^>]*>>")
"""A calculator's notes inside an answer of GSM8K, which no model should write."""

_TOKENS, _STARTS, _KEY = "tokens.npy", "starts.npy", "blocks.json"

_TOKENIZED_AT_ONCE = 64
"""Documents that are tokenized in one call."""


@dataclass(frozen=True)
class Texts:
    """Documents, each made when it is asked for.

    count: how many there are. get: a document by its index from 0. sha256: of all of them. names: where they come from.
    """

    count: int
    get: Callable[[int], str]
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """Token ids cut into blocks: block i is `tokens[starts[i] : starts[i + 1]]`. Memory-mapped where loaded.

    tokens: `[tokens]` uint32. starts: `[blocks + 1]` int64. sha256: of all ids and cuts. documents: how many were read.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sha256: str
    documents: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tensor:
        """Block `[1, S]` int64."""
        import torch

        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]
        return torch.from_numpy(ids.astype("int64"))[None]


def read_texts(
    names: Sequence[str], makers: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, length: int, seed: int
) -> Texts:
    """All documents of `--data`. Raises UserError for what cannot be read, holds nothing, or has no text.

    names: each the policy's own maker of texts, a file (.jsonl, .json, .parquet, .txt), a folder of them, or a hub
    dataset (owner/name, owner/name:split or owner/name:config:split). makers: the policy's, name to "module:function".
    length: tokens of a block, and seed: that of the training, both for the makers.
    """
    parts: list[Texts] = []
    for name in names:
        path = Path(name).expanduser()
        if name in makers:
            parts.append(_made_texts(name, makers[name], tokenizer, length, seed))
        elif path.exists():
            parts.append(_local_texts(path, tokenizer))
        else:
            parts.append(_hub_texts(name, tokenizer))
        if parts[-1].count == 0:
            raise UserError(f"{name} holds no text to train on.")
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def make_blocks(
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    length: int,
    pack: bool,
    most: int,
    seed: int,
) -> Blocks:
    """The first `most` blocks of the documents in an order drawn from `seed`. They are written to `folder`, and read
    from there if it holds them already.

    pack: True for documents one after the other, an end-of-text token between them where the tokenizer has one, cut
    every `length` tokens; a block may hold the end of one and the beginning of the next, and attention is not reset
    between them. False for one block a document, cut at `length` and left as it is where shorter.

    Raises UserError where the texts fill no block.
    """
    key = {
        "texts": texts.sha256,
        "tokenizer": _tokenizer_sha256(tokenizer),
        "length": length,
        "pack": pack,
        "most": most,
        "seed": seed,
    }
    blocks = load_blocks(folder)
    if blocks is not None and json.loads((folder / _KEY).read_text())["key"] == key:
        return blocks
    import numpy as np

    cut = _packed if pack else _single
    ids, lengths, documents = cut(_encoded(texts, tokenizer, seed, end=pack), length, most)
    if not lengths:
        raise UserError(
            f"{' and '.join(texts.names)}: the texts have fewer than {length} tokens together, which fills no block: "
            "give more, or a smaller --length."
            if pack
            else f"{' and '.join(texts.names)}: no text has two tokens."
        )
    tokens, starts = np.concatenate(ids), np.cumsum([0, *lengths], dtype=np.int64)
    sha256 = hashlib.sha256(tokens.tobytes() + starts.tobytes()).hexdigest()
    with saving(folder / _TOKENS):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _KEY).unlink(missing_ok=True)
        np.save(folder / _TOKENS, tokens)
        np.save(folder / _STARTS, starts)
    write_json(folder / _KEY, {"key": key, "sha256": sha256, "documents": documents})
    blocks = load_blocks(folder)
    assert blocks is not None
    return blocks


def load_blocks(folder: Path) -> Blocks | None:
    """The blocks in a folder; None where there are none, or only part of them."""
    import numpy as np

    if not (folder / _KEY).is_file():
        return None
    card = json.loads((folder / _KEY).read_text())
    tokens, starts = np.load(folder / _TOKENS, mmap_mode="r"), np.load(folder / _STARTS)
    return Blocks(tokens, starts, card["sha256"], card["documents"])


def _encoded(texts: Texts, tokenizer: PreTrainedTokenizerBase, seed: int, end: bool) -> Iterator[np.ndarray]:
    """Each document's ids, in the order drawn from the seed, with at most one BOS. end: add an EOS if there is none."""
    import numpy as np

    order = list(range(texts.count))
    random.Random(seed).shuffle(order)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for start in range(0, len(order), _TOKENIZED_AT_ONCE):
        documents = [texts.get(index) for index in order[start : start + _TOKENIZED_AT_ONCE]]
        encoded: Any = tokenizer(documents, verbose=False)["input_ids"]
        for ids in encoded:
            if bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
            if end and eos is not None and ids and ids[-1] != eos:
                ids = [*ids, eos]
            yield np.asarray(ids, dtype=np.uint32)


def _packed(encoded: Iterator[np.ndarray], length: int, most: int) -> tuple[list[np.ndarray], list[int], int]:
    ids: list[np.ndarray] = []
    total = documents = 0
    for document in encoded:
        ids.append(document)
        documents += 1
        total += len(document)
        if total >= most * length:
            break
    count = min(most, total // length)
    if count and (extra := total - count * length):
        import numpy as np

        ids = [np.concatenate(ids)[:-extra]]
    return ids, [length] * count, documents


def _single(encoded: Iterator[np.ndarray], length: int, most: int) -> tuple[list[np.ndarray], list[int], int]:
    ids: list[np.ndarray] = []
    documents = 0
    for document in encoded:
        documents += 1
        if len(document) >= 2:
            ids.append(document[:length])
        if len(ids) == most:
            break
    return ids, [len(block) for block in ids], documents


def _local_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """The documents of a file, or of all files in a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"The folder {path} holds no text: looked for {', '.join(SUFFIXES)}.")
    texts: list[str] = []
    sha256 = hashlib.sha256()
    for file in files:
        documents = _read_file(file, tokenizer)
        if not documents:
            raise UserError(f"{file} holds no text to train on.")
        texts += documents
        sha256.update(file.read_bytes())
    return Texts(len(texts), texts.__getitem__, sha256.hexdigest(), (path.absolute().name,))


def _read_file(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if file.suffix != ".txt":
        records = enumerate(read(file), start=1)
        texts = [text_of(record, f"{file}: record {number}", tokenizer) for number, record in records]
        return [text for text in texts if text.strip()]
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}).") from error
    return [text] if text.strip() else []


def text_of(record: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a record: its `text`; or its `messages` in the chat template; or its `question` and `answer`, as a
    solved problem without a calculator's notes.

    where: the record's place, for the message of the UserError that is raised where there is no text.
    """
    if isinstance(record.get("text"), str):
        return str(record["text"])
    if isinstance(record.get("messages"), list):
        if not tokenizer.chat_template:
            raise UserError(f"{where} is a conversation, and the tokenizer has no chat template to write it in.")
        try:
            return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
        except Exception as error:  # templates raise what they like
            raise UserError(
                f"{where} cannot be written in the tokenizer's chat template: {first_line(error).rstrip('.')}."
            ) from error
    question, answer = record.get("question"), record.get("answer")
    if isinstance(question, str) and isinstance(answer, str):
        return solved_problem(question, answer)
    fields = ", ".join(record) or "nothing"
    raise UserError(f"{where} has no text: neither `text`, `messages`, nor `question` and `answer` (it has {fields}).")


def solved_problem(question: str, answer: str) -> str:
    """A problem and its solution, without a calculator's notes."""
    return f"Question: {question.strip()}\nAnswer: {CALCULATION.sub('', answer).strip()}"


def _hub_texts(name: str, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """The documents of a hub dataset's split ("train" unless named), read from its local copy when asked for."""
    import datasets

    repo, *rest = name.split(":")
    config, split = (rest[0], rest[1]) if len(rest) > 1 else (None, rest[0] if rest else "train")
    reason = hub.why_unreachable()
    try:
        with hub_cache_only(reason is not None):
            rows = datasets.load_dataset(repo, config, split=split)
    except Exception as error:  # the library raises many kinds, none of them promised
        why = reason or (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"The dataset {name} is neither a file here nor to be had from the hub ({why}): fetch it where there is a "
            "network, or give a file."
        ) from error

    def get(index: int) -> str:
        return text_of(rows[index], f"{name}: record {index + 1}", tokenizer)

    if len(rows):
        get(0)
    return Texts(len(rows), get, hashlib.sha256(rows._fingerprint.encode()).hexdigest(), (name,))


def _made_texts(name: str, maker: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Texts:
    """The texts that a policy makes itself. maker: "module:function"."""
    module, _, function = maker.partition(":")
    texts = list(getattr(importlib.import_module(module), function)(tokenizer, length, seed))
    sha256 = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Texts(len(texts), texts.__getitem__, sha256, (name,))


def _concatenated(parts: Sequence[Texts]) -> Texts:
    starts = [0, *accumulate(part.count for part in parts)]

    def get(index: int) -> str:
        part = bisect_right(starts, index) - 1
        return parts[part].get(index - starts[part])

    sha256 = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
    return Texts(starts[-1], get, sha256, tuple(name for part in parts for name in part.names))


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{whole}{tokenizer.chat_template}".encode()).hexdigest()
