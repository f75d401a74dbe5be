"""A small tokenizer made on the spot, question files in both formats, and a way to prepare tasks with them."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suites.ruler import SUITE
from evictbench.suites.ruler.prose import sentences
from evictbench.suites.ruler.wordlists import single

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nYou are a helpful assistant.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer(vocabulary: int, bos: bool = False):
    """Byte-level BPE trained on prose and word lists; with 256 + 3 entries, every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*islice(sentences(), 3000), *(f" {word}" for word in single())], trainer)
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    return byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer(8000)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """SQuAD and HotpotQA files of invented text: 40 articles of 6 paragraphs; 60 questions of 10 documents."""
    folder = tmp_path_factory.mktemp("data")
    text = sentences()
    articles = []
    for a in range(40):
        paragraphs = []
        for p in range(6):
            context = " ".join([*islice(text, 3), f"The code of article {a}, part {p} is K{a:02d}{p}X."])
            qas = [
                {
                    "question": f"What is the code of article {a}, part {p}?",
                    "answers": [{"text": f"K{a:02d}{p}X", "answer_start": 0}, {"text": f"the code K{a:02d}{p}X"}],
                },
                {"question": f"Who wrote article {a}?", "answers": [], "is_impossible": True},
            ]
            paragraphs.append({"context": context, "qas": qas})
        articles.append({"title": f"Article {a}", "paragraphs": paragraphs})
    questions = [
        {
            "question": f"Which number has record {q}?",
            "answer": f"N{q:03d}",
            "context": [[f"Record {q}.{d}", [f" {next(text)}", f" It is numbered N{q:03d}.{d}."]] for d in range(10)],
        }
        for q in range(60)
    ]
    (folder / "squad").mkdir()
    (folder / "squad" / "invented.json").write_text(json.dumps({"version": "1", "data": articles}))
    (folder / "ruler" / "hotpotqa").mkdir(parents=True)
    (folder / "ruler" / "hotpotqa" / "invented.json").write_text(json.dumps(questions))
    return folder


@pytest.fixture(scope="session")
def prepare(tokenizer, data_dir):
    """`prepare(*tasks, context=..., limit=..., ...)` with the small tokenizer and the invented questions."""

    def prepare(*tasks: str, context: int = 1024, limit: int = 6, **changes) -> PreparedSuite:
        request = {"tokenizer": tokenizer, "chat": False, "data_dir": data_dir, "seed": 0, **changes}
        return SUITE.prepare(SuiteRequest(tasks=tasks or None, context=context, limit=limit, **request))

    return prepare


@pytest.fixture(scope="session")
def documents(prepare):
    """The documents of one task, as a list."""

    def documents(task: str, **changes) -> list[dict]:
        return list(prepare(task, **changes).metadata["ruler_samples"][task])

    return documents
