"""Fixtures for every test: small random models, the bundled model, and the folder of shared test data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import pytest

# Tests never ask the network. Set before anything imports the hub's library, and inherited by subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A slow machine is no failing example; and every run draws anew, where a CI is noticed too.
hypothesis.settings.register_profile(
    "evictbench",
    parent=hypothesis.settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("evictbench")

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
BuildModel = Callable[..., "PreTrainedModel"]


class LoadedModel(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small models are fastest, and runs repeat bit for bit, on one thread; OMP_NUM_THREADS overrides it."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_lines_about_waiting() -> None:
    """What a command says after some seconds of waiting depends on the machine; tests of it set their own seconds."""
    from evictbench.terminal import waiting

    waiting.EVERY = 1e6


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real benchmark files that lies beside the repository; the test is skipped without it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not here")
    return folder


@pytest.fixture
def tiny_llama() -> BuildModel:
    """Builder of a random Llama: see `build`."""
    return lambda **settings: build("llama", **settings)


@pytest.fixture
def tiny_qwen3() -> BuildModel:
    """Builder of a random Qwen3 (query and key norms): see `build`."""
    return lambda **settings: build("qwen3", **settings)


def build(model_type: str, *, seed: int = 0, dtype: str = "float32", **settings: Any) -> PreTrainedModel:
    """A random model in eval mode: 2 layers, 4 heads over 2 KV heads of 16, 97 tokens, unless `settings` say else.

    The same seed gives the same weights in float32 and float64. Weights are drawn wide enough for attention to have
    clear favourites; at transformers' own 0.02 it is all but uniform, and every policy would look alike.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        }
        | settings
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            torch.nn.init.constant_(weight, 2.0)
    return model.to(getattr(torch, dtype)).eval()


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The bundled model and its tokenizer in float32 on the CPU, loaded once. Leave its attention as you found it."""
    from evictbench.models import load

    source = load.resolve("smollm2")
    return LoadedModel(load.load_model(source, "cpu", "float32"), load.load_tokenizer(source))
