"""The sample browser's data: each prompt once for all policies, and answers beside each other, in packs that the page
unzips when they are opened."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.select import FULL, SHARED, comparable, text_of, texts_of

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Tokenizer


CAPS = (40_000, 16_000, 8_000, 4_000, 2_000, 1_000)
"""Letters of a prompt or answer that are kept, tried in order until the packs are small enough."""

TIGHTEST = 50
"""Texts this many times as long as there is room for are not packed to see whether they fit."""

MOST_LINES = 20_000
"""Answers that are looked at; of more, documents are chosen evenly."""

Text = str | list[Any]
"""A text, or its beginning, how many letters were left out, and its end."""


SHOWN = {
    "score": "score",
    "output_tokens": "out",
    "token_limit": "limit",
    "truncated": "cut",
    "repetition": "loop",
    "thinking": "thinking",
    "prompt_tokens": "prompt",
    "occupancy_max": "most",
    "occupancy_mean": "mean",
    "cache_bytes": "bytes",
    "metrics": "metrics",
    "answer": "answer",
    "text": "text",
}
"""Fields of a sample line that the page has, and their names there."""

TOKENIZER_FILE = "tokenizer.json"


@dataclass
class Pack:
    """The samples of one task under all runs of one group.

    arms: fingerprint and name of each run. documents: how many. data: base64 of the gzip of a JSON document that
    `assets/page.js` reads.
    """

    name: str
    suite: str
    model: str
    task: str
    arms: list[tuple[str, str]]
    documents: int
    data: str = ""


@dataclass
class Browser:
    """All packs, and sentences about what is left out of them."""

    packs: list[Pack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def browser(samples: pd.DataFrame, documents: int | None, tokenizer: Path | None, room: int) -> Browser:
    """The packs of these samples.

    documents: the most of each task, None for all that fit. tokenizer: a folder with tokenizer.json, None for the
    model's own. room: bytes that all packs may take. Long texts lose their middle before documents are left out.
    """
    browser = Browser()
    if documents == 0:
        browser.notes.append("Prompts and answers were left out of this report.")
        return browser
    samples = samples.assign(group=comparable(samples))
    chosen = _choose(samples, documents)
    if len(chosen) < len(samples):
        left = f"{len(chosen):,} of {len(samples):,} answers"
        browser.notes.append(f"The sample browser holds {left}: documents were chosen evenly from each task.")
    contents = list(_contents(chosen, tokenizer, browser))
    tries = [(cap, 1) for cap in CAPS] + [(CAPS[-1], 2**halved) for halved in range(1, 11)]
    for cap, share in tries:
        packed = _all(contents, cap, share, room)
        if packed is not None:
            break
    else:
        browser.notes.append("There was no room for prompts and answers in this report.")
        return browser
    for (pack, _), (data, count) in zip(contents, packed, strict=True):
        pack.data, pack.documents = data, count
        browser.packs.append(pack)
    if share > 1:
        browser.notes.append(f"To keep the file small, one of {share} documents is in the sample browser.")
    if any(isinstance(text, list) for _, content in contents for text in _texts(content, cap)):
        browser.notes.append(f"Texts longer than {cap:,} letters are shown without their middle.")
    return browser


def load(model: str, weights: str, folder: Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model; None if it is not on this machine. Neither the network nor the model is used.

    It is read from `folder` if one is given, else from the hub's local cache at the commit that `weights` names.
    """
    from tokenizers import Tokenizer

    file = folder / TOKENIZER_FILE if folder is not None else _find(model, weights)
    if file is None or not file.is_file():
        return None
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} is not a tokenizer: {error}.") from None
    return tokenizer


def decode(tokenizer: Tokenizer, ids: Sequence[int], border: int | None) -> tuple[str, str]:
    """The prompt up to the border, and what comes after it, as the model saw them, special tokens included."""
    at = len(ids) if border is None else border
    return _text(tokenizer, ids[:at]), _text(tokenizer, ids[at:])


def _choose(samples: pd.DataFrame, documents: int | None) -> pd.DataFrame:
    """The samples of at most `documents` documents of each task, evenly chosen, alike for all runs of a group."""
    keys = samples[["group", "task", "doc_id"]].drop_duplicates()
    most = documents
    if len(samples) > MOST_LINES:
        per_document = len(samples) / len(keys)
        tasks = len(keys[["group", "task"]].drop_duplicates())
        fitting = max(1, int(MOST_LINES / per_document / tasks))
        most = fitting if most is None else min(most, fitting)
    if most is None:
        return samples
    kept = []
    for _, of_task in keys.groupby(["group", "task"], observed=True):
        ids = sorted(of_task["doc_id"])
        picked = sorted({ids[round(i * (len(ids) - 1) / max(1, most - 1))] for i in range(min(most, len(ids)))})
        kept.append(of_task[of_task["doc_id"].isin(picked)])
    import pandas as pd

    return samples.merge(pd.concat(kept), on=["group", "task", "doc_id"])


def _contents(chosen: pd.DataFrame, folder: Path | None, browser: Browser) -> Iterator[tuple[Pack, dict[str, Any]]]:
    """A pack and its content for each group and task; texts whole."""
    lines = _Lines(chosen)
    tokenizers: dict[tuple[str, str], Tokenizer | None] = {}
    for number, group in chosen.groupby("group", observed=True):
        first = group.iloc[0]
        suite, model, weights = str(first["suite"]), str(first["model"]), str(first["weights"])
        if (model, weights) not in tokenizers:
            tokenizers[model, weights] = load(model, weights, folder)
            if tokenizers[model, weights] is None:
                browser.notes.append(
                    f"Prompts of {model} are not shown: its tokenizer is not here (--tokenizer FOLDER)."
                )
        told = _told_apart(chosen, int(number))
        for task, of_task in group.groupby("task", observed=True):
            content = _content(of_task, lines, tokenizers[model, weights])
            name = ", ".join(filter(None, (suite, model, str(task), told)))
            yield Pack(name, suite, model, str(task), content["arms"], len(content["docs"])), content


def _told_apart(samples: pd.DataFrame, group: int) -> str:
    """The part of a group's protocol that differs between groups of its suite and model: "context 1024"."""
    own = samples[samples["group"] == group]
    first = own.iloc[0]
    beside = samples[(samples["suite"] == first["suite"]) & (samples["model"] == first["model"])]
    differing = [name for name in SHARED if texts_of(beside[name]).nunique() > 1]
    return ", ".join(f"{name.replace('_', ' ')} {text_of(first[name])}" for name in differing)


class _Lines:
    """The lines of chosen samples, each run folder read once; prompts once for all runs."""

    def __init__(self, chosen: pd.DataFrame) -> None:
        keys = chosen[["folder", "task", "doc_id", "repeat"]].astype(object)
        self._chosen: dict[str, set[run_folder.Key]] = {}
        for folder, *key in keys.itertuples(index=False):
            self._chosen.setdefault(folder, set()).add((key[0], key[1], key[2]))
        self._found: dict[str, dict[run_folder.Key, dict[str, Any]]] = {}
        self._prompts: dict[str, str] = {}

    def of(self, folder: str) -> Mapping[run_folder.Key, dict[str, Any]]:
        if folder not in self._found:
            lines = run_folder.read_samples(Path(folder))
            lines = {key: line for key, line in lines.items() if key in self._chosen[folder]}
            for line in lines.values():
                packed = line.pop("prompt_ids", None)
                if packed is not None:
                    self._prompts.setdefault(str(line.get("prompt_hash")), packed)
                for name in ("tokens", "by_position"):
                    line.pop(name, None)
                for name in ("text", "answer"):
                    line[name] = _cut(line.get(name), CAPS[0])
            self._found[folder] = lines
        return self._found[folder]

    def prompt(self, line: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Token ids of a line's prompt; None where the run did not keep it."""
        packed = self._prompts.get(str(line.get("prompt_hash")))
        try:
            return run_folder.prompt_ids({"prompt_ids": packed})
        except ValueError as error:
            raise UserError(f"Document {line['doc_id']} of {line['task']} is damaged: {error}.") from None


def _content(of_task: pd.DataFrame, lines: _Lines, tokenizer: Tokenizer | None) -> dict[str, Any]:
    runs = of_task.drop_duplicates("fingerprint")
    names = {str(run["fingerprint"]): _arm(run) for _, run in runs.iterrows()}
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    marks = sorted(names, key=lambda mark: (names[mark] != FULL, _by_number(names[mark])))
    arms = [(mark, f"{names[mark]} ({mark})" if names[mark] in twice else names[mark]) for mark in marks]
    prompts: list[list[Any]] = []
    number_of: dict[str, int] = {}
    documents: dict[tuple[int, int, str], dict[str, Any]] = {}
    rows = of_task[["folder", "fingerprint", "task", "doc_id", "repeat"]].astype(object)
    for folder, mark, task, doc_id, repeat in rows.itertuples(index=False):
        line = lines.of(str(folder))[task, doc_id, repeat]
        prompt = str(line.get("prompt_hash"))
        if prompt not in number_of:
            number_of[prompt] = len(prompts)
            prompts.append(_prompt(lines.prompt(line), line.get("border"), tokenizer))
        # Two runs may have cut the same document to two prompts; then they are two samples.
        sample = documents.setdefault(
            (doc_id, repeat, prompt), {"doc": doc_id, "repeat": repeat, "prompt": number_of[prompt], "arms": {}}
        )
        sample["arms"][marks.index(str(mark))] = {short: line.get(name) for name, short in SHOWN.items()}
    return {"arms": arms, "prompts": prompts, "docs": [documents[key] for key in sorted(documents)]}


def _by_number(name: str) -> list[tuple[int, str]]:
    """For sorting: numbers by their size, words by their letters."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _arm(run: pd.Series) -> str:
    return str(run["policy"]) if text_of(run["budget"]) == "none" else f"{run['policy']} {run['budget']}"


def _prompt(ids: Sequence[int] | None, border: int | None, tokenizer: Tokenizer | None) -> list[Any]:
    """The text up to the border and from it on, or why it is not there."""
    if ids is None:
        return ["", "", "The prompt was too long to be kept in the run."]
    if tokenizer is None:
        return ["", "", "The model's tokenizer was not on the machine that made this report."]
    return [*(_cut(part, CAPS[0]) for part in decode(tokenizer, ids, border)), ""]


def _all(
    contents: Sequence[tuple[Pack, Mapping[str, Any]]], cap: int, share: int, room: int
) -> list[tuple[str, int]] | None:
    """Every pack's data and its number of documents; None if they need more room."""
    if sum(_length(text) for _, content in contents for text in _texts(content, cap)) > TIGHTEST * room * share:
        return None
    packed: list[tuple[str, int]] = []
    for _, content in contents:
        packed.append(_pack(content, cap, share))
        if sum(len(data) for data, _ in packed) > room:
            return None
    return packed


def _pack(content: Mapping[str, Any], cap: int, share: int) -> tuple[str, int]:
    """The content with its texts cut and one of `share` documents, packed; and how many documents it has."""
    kept = content["docs"][::share]
    used = {number: place for place, number in enumerate(sorted({document["prompt"] for document in kept}))}
    prompts = [[_cut(part, cap) for part in content["prompts"][number]] for number in used]
    documents = [
        document
        | {
            "prompt": used[document["prompt"]],
            "arms": {
                arm: sample | {name: _cut(sample[name], cap) for name in ("text", "answer")}
                for arm, sample in document["arms"].items()
            },
        }
        for document in kept
    ]
    text = json.dumps({"arms": content["arms"], "prompts": prompts, "docs": documents}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(), len(kept)


def _texts(content: Mapping[str, Any], cap: int) -> Iterator[Text | None]:
    for prompt in content["prompts"]:
        yield from (_cut(part, cap) for part in prompt)
    for document in content["docs"]:
        for sample in document["arms"].values():
            yield _cut(sample["text"], cap)


def _cut(text: Any, cap: int) -> Text | None:
    """At most `cap` letters. A quarter of them is the end: that is where questions and answers are."""
    if text is None:
        return None
    begin, left_out, end = text if isinstance(text, list) else (str(text), 0, "")
    if len(begin) + len(end) <= cap:
        return [begin, left_out, end] if left_out else begin
    tail = cap // 4
    shown = begin[: cap - tail], (end or begin)[-tail:]
    return [shown[0], len(begin) + left_out + len(end) - len(shown[0]) - len(shown[1]), shown[1]]


def _length(text: Text | None) -> int:
    return sum(len(part) for part in text if isinstance(part, str)) if text is not None else 0


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def _find(model: str, weights: str) -> Path | None:
    """The tokenizer of the bundled model, or of a model in the hub's local cache at a commit. A model's name in results
    is never a path: it could be anybody's."""
    from evictbench.models import bundled

    if model == bundled.NAME:
        return bundled.converted_folder() / TOKENIZER_FILE
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    commit = re.fullmatch("commit:([0-9a-f]{40})", weights)
    try:
        cached = try_to_load_from_cache(model.partition("@")[0], TOKENIZER_FILE, revision=commit and commit[1])
    except (HFValidationError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None
