"""A small tokenizer made on the spot, made-up records for all the tasks, and a way to prepare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from longbench_records import record, write

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suites.longbench import SUITE
from evictbench.suites.longbench.tasks import LONGBENCH_E, OFFICIAL
from evictbench.suites.longbench.templates import TEMPLATES

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def longbench_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task in (*OFFICIAL, *LONGBENCH_E):
        write(folder / "longbench", task, [record(task, number) for number in range(3)])
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE; most Chinese characters are two or three tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([text for text in TEMPLATES.values() if text.isascii()], trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def prepare(tokenizer, longbench_dir):
    """`prepare(*tasks, chat=..., window=..., ...)` with the small tokenizer and the made-up records."""

    def prepare(*tasks: str, **changes: Any) -> PreparedSuite:
        request = {"tokenizer": tokenizer, "chat": True, "data_dir": longbench_dir, **changes}
        return SUITE.prepare(SuiteRequest(tasks=tasks or None, **request))

    return prepare
