"""Our prompts against those of upstream's own generator, where RULER_CHECKOUT names a checkout of NVIDIA/RULER."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from evictbench.suites.ruler.prose import sentences
from evictbench.suites.ruler.tasks import NOISE, TASKS

CONTEXT, SAMPLES = 4096, 4
CHECKOUT = os.environ.get("RULER_CHECKOUT", "")

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="RULER_CHECKOUT names no checkout of NVIDIA/RULER")

Sample = dict[str, Any]
"""`text`: the whole prompt. `outputs`: the answers. `tokens`: of the prompt and of the longest answer."""


@pytest.fixture(scope="module")
def essays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("essays") / "prose.txt"
    file.write_text(" ".join(islice(sentences(), 600)))
    return file


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, data_dir: Path, essays: Path) -> Any:
    """Task to the samples that upstream's scripts make with our tokenizer, essays and questions."""
    work = tmp_path_factory.mktemp("upstream")
    shutil.copytree(Path(CHECKOUT) / "scripts" / "data", work / "data")
    content = work / "data" / "synthetic" / "json"
    (content / "PaulGrahamEssays.json").write_text(json.dumps({"text": essays.read_text()}))
    # Its second list of words, which is used where the first is too short.
    (content / "english_words.json").write_text(json.dumps({i: f"w{i}" for i in range(10_000)}))
    squad = json.loads((data_dir / "squad" / "invented.json").read_text())
    for question in (q for article in squad["data"] for p in article["paragraphs"] for q in p["qas"]):
        question.setdefault("is_impossible", False)
    (content / "squad.json").write_text(json.dumps(squad))
    shutil.copy(data_dir / "ruler" / "hotpotqa" / "invented.json", content / "hotpotqa.json")
    tokenizer.backend_tokenizer.save(str(work / "tokenizer.json"))
    calls = []
    for name, settings in _settings().items():
        options = {
            "save_dir": work / "out",
            "save_name": name,
            "tokenizer_path": "-",
            "max_seq_length": CONTEXT,
            "num_samples": SAMPLES,
            "tokens_to_generate": settings["tokens_to_generate"],
            "template": settings["template"] + settings["answer_prefix"],
            **settings["args"],
        }
        script = work / "data" / "synthetic" / f"{settings['task']}.py"
        calls.append([str(script), *(text for key, value in options.items() for text in (f"--{key}", str(value)))])
    command = [sys.executable, str(Path(__file__).with_name("upstream_driver.py")), str(work / "tokenizer.json"), "400"]
    done = subprocess.run(command, input=json.dumps(calls), text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]

    def samples(name: str) -> list[Sample]:
        lines = (work / "out" / name / "validation.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [
            {"text": r["input"] + r["answer_prefix"], "outputs": r["outputs"], "tokens": r["length"]} for r in records
        ]

    return samples


def _settings() -> dict[str, dict[str, Any]]:
    """Upstream's tables joined: task to its script, options, template, answer prefix and answer tokens."""
    scripts = Path(CHECKOUT) / "scripts"
    constants: dict[str, Any] = {}
    exec((scripts / "data" / "synthetic" / "constants.py").read_text(), constants)
    tasks = yaml.safe_load((scripts / "synthetic.yaml").read_text())
    return {name: {**constants["TASKS"][task["task"]], **task} for name, task in tasks.items()}


@pytest.fixture(scope="module")
def ours(documents: Any, essays: Path) -> Any:
    """`ours(task)`: our samples of the same length."""

    def samples(name: str, **changes: Any) -> list[Sample]:
        made = documents(name, context=CONTEXT, limit=SAMPLES, haystack=essays, **changes)
        room = TASKS[name].answer_tokens
        return [
            {
                "text": f"{doc['input']} {doc['gen_prefix']}",
                "outputs": doc["outputs"],
                "tokens": doc["prompt_tokens"] + room,
            }
            for doc in made
        ]

    return samples


UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(rf"One of the special magic (numbers|uuids) for ([^.:]+?) is: ({UUID}|[1-9]\d{{6}})\.")


def _needles(text: str) -> tuple[str, Any]:
    """The prompt without what was drawn, and the number of needles: a needle's key and value, the key asked for, and
    how much of the haystack there is, which the test of lengths compares."""
    found = NEEDLE.findall(text)
    frame = NEEDLE.sub(r"<needle \1>", text)
    frame = re.sub(r" for [^.:]+? mentioned", " for <keys> mentioned", frame)
    first, *lines, question = frame.split("\n")
    if {*lines} - {NOISE, *(line for line in lines if line.startswith("<needle"))}:  # an essay
        (essay,) = lines
        whole = re.sub(r" ?<needle \w+>", "", essay).strip()
        assert " ".join(islice(sentences(), 600)).startswith(whole)
        lines = re.findall(r"<needle \w+>", essay)
        return "\n".join([first, *lines, question]), len(found)
    amount = len(found) if NOISE in lines else min(len(found), 20)
    return "\n".join([first, *sorted({*lines}), question]), amount


def _tracking(text: str) -> tuple[str, Any]:
    names = re.sub(r"\b[A-Z]{5}\b", "<name>", re.sub(r"\b[A-Z]{3}\b(?<!VAR)", "<short>", text))
    frame = re.sub(r"\b\d{5}\b", "<value>", names)
    kept = list(dict.fromkeys(frame.split("\n")))
    return "\n".join(kept), Counter(line for line in frame.split("\n") if line != NOISE)


def _common(text: str) -> tuple[str, Any]:
    parts = re.split(r"(?<=\n)(1\. .*?)(?=\nQuestion)", text)
    shapes = []
    for words in parts[1::2]:
        counts = Counter(re.split(r" ?\d+\. ", words)[1:])
        often = counts.most_common(10)
        shapes.append((sorted({n for _, n in often}), sorted({*counts.values()} - {n for _, n in often})))
        assert [int(n) for n in re.findall(r"(\d+)\. ", words)] == list(range(1, counts.total() + 1))
    frame = re.sub(r"(\d+\. )[^\d\n]+(?= \d|\n)", r"\1<word>", "\n<words>".join(parts[::2]))
    return frame, shapes


def _frequent(text: str) -> tuple[str, Any]:
    before, words, after = re.fullmatch(r"(.*coded words\. )(.*)(\nQuestion.*)", text, re.DOTALL).groups()
    counts = [count for _, count in Counter(words.split()).most_common()]
    assert Counter(words.split()).most_common(1)[0][0] == "..."
    assert {len(word) for word in words.split()} == {3, 6}
    # The Zipf share of each rank, whatever the text's length.
    shares = [round(counts[rank] / counts[0] * (rank + 1) ** 2, 1) for rank in range(3)]
    return before + "<words>" + after, shares


def _questions(text: str) -> tuple[str, Any]:
    numbers = [int(number) for number in re.findall(r"^Document (\d+):$", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    frame = re.sub(r"Document 1:\n.*(?=\n\nAnswer the question)", "<documents>", text, flags=re.DOTALL)
    asked = re.search(r"Question: (.*?) Answer:", frame)[1]
    return frame.replace(asked, "<question>"), asked


SHAPES = {"vt": _tracking, "cwe": _common, "fwe": _frequent, "qa_1": _questions, "qa_2": _questions}


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_upstreams_but_for_what_is_drawn(theirs: Any, ours: Any, name: str) -> None:
    shape = SHAPES.get(name, _needles)
    for their, our in zip(theirs(name), ours(name), strict=True):
        expected, amounts = shape(_known_differences(name, their["text"]))
        frame, our_amounts = shape(our["text"])
        assert frame == expected
        assert our_amounts == amounts
        assert len(our["outputs"]) == len(their["outputs"])
        # Ours is as full or fuller, and neither is longer than the context.
        assert 0.9 * CONTEXT < our["tokens"] <= CONTEXT
        assert their["tokens"] <= CONTEXT


def _known_differences(name: str, text: str) -> str:
    """Upstream's text without what the card says differs: the blank that ends vt's answer prefix."""
    return text.replace("they are:  ", "they are: ").removesuffix(" ") if name == "vt" else text


@pytest.mark.parametrize("name", TASKS)
def test_answer_tokens_and_metrics_are_upstreams(name: str) -> None:
    settings = _settings()[name]
    scores: dict[str, Any] = {}
    exec((Path(CHECKOUT) / "scripts" / "eval" / "synthetic" / "constants.py").read_text(), scores)
    assert settings["tokens_to_generate"] == TASKS[name].answer_tokens
    assert scores["TASKS"][settings["task"]]["metric_fn"].__name__ == f"string_match_{TASKS[name].metric}"
