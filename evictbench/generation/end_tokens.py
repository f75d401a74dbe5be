"""The tokens that end an answer: those that the model states, its tokenizer's, and the chat template's end of turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evictbench.suite.chat_template import end_of_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EndTokens:
    """ids: every token that ends an answer. stated: those of the generation config, or where it has none, the
    tokenizer's; alone they leave out the end of turn of many chat models. names: the tokens in words."""

    ids: frozenset[int]
    stated: frozenset[int]
    names: tuple[str, ...]

    @property
    def record(self) -> str:
        """The tokens in a run's record: "<|im_end|> (2), </s> (0)"."""
        return ", ".join(self.names) or "none"

    @property
    def identity(self) -> str | None:
        """What goes into a fingerprint: None where all that ends an answer is stated."""
        return None if self.ids == self.stated else ", ".join(map(str, sorted(self.ids)))


def end_tokens(stated: int | Iterable[int] | None, tokenizer: PreTrainedTokenizerBase) -> EndTokens:
    """The end tokens of a model. stated: `eos_token_id` of its generation config."""
    own = _ids(tokenizer.eos_token_id)
    of_model = _ids(stated) or own
    turn: str | None = end_of_turn(tokenizer)
    ids = of_model | own | (frozenset() if turn is None else _ids(tokenizer.convert_tokens_to_ids(turn)))
    names = tuple(f"{tokenizer.decode([token])} ({token})" for token in sorted(ids))
    return EndTokens(ids, of_model, names)


def _ids(value: Any) -> frozenset[int]:
    """The ids in None, a number or several."""
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else map(int, value))
