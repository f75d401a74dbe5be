"""A tiny model with the bundled tokenizer in a folder, and tiny lm-eval tasks on local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = [
    ("The colour of the sky is", " blue", " green and heavy", 0),
    ("Two and two make", " five or more", " four", 1),
    ("A cat says miaow, and a dog says", " woof", " nothing at all", 0),
    ("The letters a, b, c are followed by", " z and then y", " d", 1),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers that speaks the bundled model's tokens, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from evictbench.models import load

    path = tmp_path_factory.mktemp("tiny")
    tokenizer = load.load_tokenizer(load.resolve("smollm2"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on one local file: generation, multiple choice, and the log-likelihood of the right answer."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{filler(i)}{question}", "first": first, "second": second, "label": label}
        for i, (question, first, second, label) in enumerate(QUESTIONS)
    ]
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path / 'data.jsonl'}\ntest_split: test\n"
    (path / "tiny_gen.yaml").write_text(
        f"task: tiny_gen\n{common}output_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{[first, second][label]}}"\n'
        "generation_kwargs:\n  until: ['\\n']\n  max_gen_toks: 12\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
        "metadata:\n  version: 1.5\n"
    )
    (path / "tiny_choice.yaml").write_text(
        f"task: tiny_choice\n{common}output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{[first, second]}}"\ndoc_to_target: label\n'
        'target_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: acc_norm\n    aggregation: mean\n    higher_is_better: true\nmetadata:\n  version: 2.0\n"
    )
    (path / "tiny_rolling.yaml").write_text(
        f"task: tiny_rolling\n{common}output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{question}}"\n'
        "metric_list:\n  - metric: word_perplexity\nmetadata:\n  version: 1.0\n"
    )
    return path


def filler(number: int) -> str:
    """Enough text for a budget to bind: some 60 tokens."""
    return " ".join(f"Line {i} of note {number} is about nothing much." for i in range(6)) + "\n"


@pytest.fixture
def manager(task_folder: Path) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(task_folder), include_defaults=False)
