"""Models by name: the bundled one, a local folder, or a hub id; checked before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evictbench import bundled
from evictbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    name: str
    kind: Literal["bundled", "local", "hub"]


def resolve(name: str) -> Source:
    """What a `--model` argument means."""
    if name == bundled.NAME:
        return Source(name, "bundled")
    if Path(name).expanduser().is_dir():
        return Source(name, "local")
    raise UserError(f"There is no model {name}.")


def _folder(source: Source) -> Path:
    return bundled.ensure() if source.kind == "bundled" else Path(source.name).expanduser()


def load_tokenizer(source: Source, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(source), trust_remote_code=trust_remote_code)


def load_config(source: Source, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(_folder(source), trust_remote_code=trust_remote_code)


def context_window(config: PretrainedConfig) -> int:
    """Tokens that the model was made for."""
    return int(config.max_position_embeddings)


def check_supported(config: PretrainedConfig) -> None:
    """Raise UserError for a model that is not plain softmax attention."""


def load_model(
    source: Source, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        _folder(source),
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
    )
    return model.to(device).eval()


def weights_hash(source: Source) -> str:
    """A name for the weights."""
    return f"gguf-sha256:{bundled.GGUF_SHA256}:v{bundled.CONVERSION_VERSION}"
