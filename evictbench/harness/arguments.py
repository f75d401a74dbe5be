"""An lm-eval task's settings for generation in the project's terms, and text encoded as lm-eval encodes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.evaluation.tasks import UNSTATED_LIMIT
from evictbench.suite import chat_template
from evictbench.suite.spec import GREEDY, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCORED = ("multiple_choice", "loglikelihood")
"""The output types of tasks that score given continuations."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p")

NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "length_penalty": 1, "use_cache": True}
"""Generation settings that are not offered, each with the one value that may be given because it has no effect."""


def generation_settings(given: Mapping[str, Any], name: str) -> tuple[Sampling, int, tuple[str, ...]]:
    """Sampling, token limit and stop strings from a task's generation_kwargs. name: the task's, for sentences.

    As in transformers, sampling without a temperature has temperature 1. Where do_sample is not given, a temperature
    above 0 samples. Raises UserError for settings that are not offered.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    settings: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), UNSTATED_LIMIT))
    limit, until = settings.pop("max_gen_toks"), settings.pop("until")
    sampled = settings.pop("do_sample", False)
    sampling = {key: settings.pop(key) for key in SAMPLING if settings.get(key) is not None}
    for key, value in settings.items():
        if value is not None and NEUTRAL.get(key) != value and key not in SAMPLING:
            raise UserError(f"{name} asks for {key}={value}, which is not offered under an eviction policy.")
    if limit < 1:
        raise UserError(f"{name} asks for {limit} tokens; an answer has at least 1.")
    temperature = float(sampling.get("temperature", 1.0))
    if not sampled or temperature == 0:
        chosen = GREEDY
    else:
        top_p, min_p = float(sampling.get("top_p", 1.0)), float(sampling.get("min_p", 0.0))
        chosen = Sampling(temperature, top_p, int(sampling.get("top_k", 0)), min_p)
    return chosen, limit, tuple(stop for stop in until if stop)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool = True,
    *,
    where: str = "a conversation",
) -> str:
    """Messages in the chat template; without the generation prompt, the last message is left open to be continued.

    where: the document, for sentences. Raises UserError as `evictbench.suite.chat_template.render` does.
    """
    return chat_template.render(
        tokenizer,
        messages,
        where=where,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of the continuation behind it. Blanks at the context's end go to the continuation, as
    in lm-eval."""
    blanks = len(context) - len(context.rstrip())
    if blanks:
        context, continuation = context[:-blanks], context[-blanks:] + continuation
    before = encode_text(tokenizer, context)
    return before, encode_text(tokenizer, context + continuation)[len(before) :]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids with what the tokenizer puts in front of text, unless the text already begins with the BOS token."""
    bos = tokenizer.bos_token
    return list(tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(str(bos)))))
