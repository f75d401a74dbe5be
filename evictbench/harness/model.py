"""The lm-eval model "evictbench": anybody's lm-eval task, answered under an eviction policy.

lm-eval 0.4.13 finds no models of other packages by itself; `evictbench-lm-eval` (harness.py) is its command line with
this one registered, and so is Python after `import evictbench.harness.model`:

    evictbench-lm-eval --model evictbench --model_args pretrained=smollm2,policy=h2o,budget=512 --tasks gsm8k_cot

Settings of a policy ride on its name as everywhere, with semicolons in place of commas, which lm-eval splits at:
`--model_args 'policy=snapkv:window=16;kernel=5,budget=256'`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation import thinking
from evictbench.generation.generator import Generator, Request
from evictbench.generation.loglikelihood import Choice, ChoiceScorer
from evictbench.harness.arguments import encode_text, generation_settings
from evictbench.models import load
from evictbench.models.policy_weights import equip
from evictbench.policy.budget import Budget
from evictbench.policy.step import ModelShape
from evictbench.store import run_folder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from evictbench.suite.spec import Suite

DEVICE_OF_LM_EVAL = "cuda:0"
"""What lm-eval's command line passes where no --device is given; taken as "auto"."""

CACHE_OWNER = "evictbench"
"""The key in a response cache that says whose answers it holds."""


@register_model("evictbench")
class EvictBenchLM(TemplateLM):  # type: ignore[misc]
    """A model under an eviction policy, as lm-eval drives it.

    pretrained: "smollm2", a folder, or a hub id. policy, budget, weights, prefill, chunk: as for `evictbench run`.
    batch_size: rows decoded together ("auto": 8). max_length: tokens of prompt and answer, the model's window at most.
    thinking: the chat template's switch, "on", "off" or "auto". seed: of sampling.

    What does not fit is refused, never cut. Raises UserError for anything the user can put right.
    """

    def __init__(
        self,
        pretrained: str = load.DEFAULT_MODEL,
        policy: str = "full",
        budget: int | str | None = None,
        weights: str | None = None,
        prefill: str = "native",
        chunk: int = 512,
        batch_size: int | str = 8,
        dtype: str = "auto",
        device: str = "auto",
        max_length: int | None = None,
        thinking: str = "auto",
        seed: int = 0,
        trust_remote_code: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        unknown.pop("max_batch_size", None)  # lm-eval's own, for its search of a batch size
        for name in unknown:
            raise registry.unknown("model argument", name, ARGUMENTS)
        for name, value, words in (("prefill", prefill, PREFILLS), ("thinking", _word(thinking), SWITCH)):
            if value not in words:
                raise registry.unknown("value", str(value), words, f" of {name}")
        chosen = registry.parse_policy(str(policy).replace(";", ","))
        if chosen.policy.needs_budget == (budget is None):
            raise UserError(f"{chosen.name} {'needs a budget' if budget is None else 'takes no budget'}.")
        self.source = load.resolve(str(pretrained))
        config = load.load_config(self.source, trust_remote_code)
        self.policy = chosen.policy(chosen.config)
        self.policy.fit(config)
        self.budget = None if budget is None else Budget.parse(str(budget))
        trained = equip(self.policy, weights, self.source, self.source.name, ModelShape.of(config))
        least = self.policy.minimum_budget(ModelShape.of(config))
        if self.budget is not None and self.budget.tokens is not None and self.budget.tokens < least:
            raise UserError(f"{chosen.label} needs a budget of at least {least} entries on {pretrained}, not {budget}.")
        window = load.context_window(config)
        self.max_length = min(int(max_length or window), window)
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code)
        self.seed = int(seed)
        self._switch = _word(thinking)
        self._thinking: Any = None
        self.model = load.load_model(self.source, str(device), str(dtype), trust_remote_code)
        self._device = self.model.device
        settings: dict[str, Any] = {
            "prefill": prefill,
            "chunk": int(chunk),
            "batch_size": 8 if str(batch_size).startswith("auto") else int(batch_size),
        }
        self._generator = Generator(self.model, self.tokenizer, self.policy, self.budget, seed=self.seed, **settings)
        self._scorer = ChoiceScorer(self.model, self.policy, self.budget, **settings)
        self.identity = {
            "model": self.source.name,
            "weights": load.weights_hash(self.source),
            "dtype": str(self.model.dtype),
            "policy": {"name": chosen.name, "settings": chosen.settings, "source": chosen.source},
            "budget": None if self.budget is None else str(self.budget),
            "prefill": prefill,
            "chunk": int(chunk),
            "thinking": self._switch,
            **({} if trained is None else {"policy_weights": trained.identity}),
        }

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> EvictBenchLM:
        """From "pretrained=smollm2,policy=h2o,budget=512"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> EvictBenchLM:
        """From model arguments, which go before what lm-eval adds of its own options."""
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if added.get("device") == DEVICE_OF_LM_EVAL:
            del added["device"]
        return cls(**{**added, **arg_dict})

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of rendered prompts."""
        return self.source.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; see `encode_text`."""
        if add_special_tokens is None:
            return encode_text(self.tokenizer, string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template's text, for lm-eval's records."""
        if chat_template and not self.tokenizer.chat_template:
            raise UserError(f"The tokenizer of {self.source.name} has no chat template: drop --apply_chat_template.")
        return super().chat_template(chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the prompt's text."""
        if self._thinking is None:
            self._thinking = thinking.settle(self.tokenizer, self._switch, self.source.name)
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take lm-eval's response cache (--use_cache), if its answers are this model's under this very policy.

        lm-eval's key is the prompt and its settings alone, so that two policies would answer for each other.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            own, held = run_folder.fingerprint(self.identity), answers.get(CACHE_OWNER)
            if held is None and len(answers) == 0:
                answers[CACHE_OWNER] = own
            elif held != own:
                raise UserError(
                    f"The response cache {answers.filename} holds answers of another model, policy or budget: "
                    "give each its own --use_cache path."
                )
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer every prompt. Raises UserError, before the first answer, for what does not fit or is not offered."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        asked = list(self._requests(requests))
        texts: dict[int, str] = {}
        with tqdm(total=len(asked), desc="Generating under the policy", disable=disable_tqdm) as bar:
            for completion in self._generator.run(asked):
                index = completion.key
                assert isinstance(index, int)
                text = completion.text
                if asked[index].thinking:
                    text = thinking.answer_of(text, self._thinking.opened).text
                texts[index] = text
                if asked[index].sampling.temperature == 0:
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update()
        return [texts[index] for index in range(len(asked))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would give it."""
        for request in requests:
            if not request.args[0]:
                raise UserError(
                    f"{_named(request)} asks for a continuation of an empty context, and there is nothing to evict "
                    "from: such metrics (mutual information) are not offered under a policy."
                )
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text without a prompt has no budget to keep to."""
        raise UserError(
            "Rolling log-likelihood scores whole texts without a prompt, which says nothing about eviction: "
            "use `evictbench run --suite fidelity` for perplexity under a policy."
        )

    def choices(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Choice]:
        """Token ids of contexts and continuations as choices, keyed by number, those of one context side by side.

        Raises UserError for one that is longer than the window.
        """
        by_context: dict[tuple[int, ...], list[Choice]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if len(context) + len(continuation) > self.max_length:
                raise UserError(
                    f"A context of {len(context)} tokens with a continuation of {len(continuation)} is longer than "
                    f"the window of {self.source.name}, {self.max_length} tokens; nothing is cut silently."
                )
            choice = Choice(number, tuple(context), tuple(continuation))
            by_context.setdefault(choice.prompt, []).append(choice)
        return (choice for same in by_context.values() for choice in same)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm  # type: ignore[import-untyped]

        found: dict[int, tuple[float, bool]] = {}
        choices = self.choices([(context, continuation) for _, context, continuation in requests])
        with tqdm(total=len(requests), desc="Scoring under the policy", disable=disable_tqdm) as bar:
            for scored in self._scorer.run(choices):
                assert isinstance(scored.key, int)
                found[scored.key] = (scored.logprob, scored.greedy)
                self.cache_hook.add_partial("loglikelihood", requests[scored.key][0], found[scored.key])
                bar.update()
        return [found[number] for number in range(len(requests))]

    def _requests(self, instances: Sequence[Instance]) -> Iterator[Request]:
        repeats: Counter[tuple[Any, ...]] = Counter()
        for index, instance in enumerate(instances):
            text, given = instance.args[:2]
            sampling, limit, stop = generation_settings(given, _named(instance))
            prompt = self.tok_encode(text)
            if len(prompt) + limit > self.max_length:
                raise UserError(
                    f"{_named(instance)}: the prompt has {len(prompt)} tokens and the answer may have {limit}, more "
                    f"than the window of {self.source.name}, {self.max_length}; nothing is cut silently: lower the "
                    "limit with --gen_kwargs max_gen_toks=N, or leave the sample out."
                )
            sample = (instance.task_name, instance.doc_id, instance.idx)
            identity = int.from_bytes(hashlib.sha256(repr(sample).encode()).digest()[:8])
            yield Request(
                key=index,
                prompt=tuple(prompt),
                border=None,
                max_new_tokens=limit,
                stop=stop,
                sampling=sampling,
                draw=(identity, repeats[sample]),
                thinking=self._thinking is not None and self._thinking.on,
            )
            repeats[sample] += 1


PREFILLS = ("native", "dense", "bounded")
SWITCH = ("auto", "on", "off")
ARGUMENTS = (
    *("pretrained", "policy", "budget", "prefill", "chunk", "batch_size", "dtype", "device"),
    *("max_length", "thinking", "seed", "trust_remote_code"),
)


def suite_for(task: str) -> Suite:
    """A suite of one lm-eval task, group or tag, by its name; see lm_suite.py."""
    from evictbench.harness import suite

    return suite.suite_for(task)


def _named(instance: Instance) -> str:
    return f"{instance.task_name}, sample {instance.doc_id}"


def _word(value: Any) -> str:
    """lm-eval reads "on" as a word but "true" as a truth value."""
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
