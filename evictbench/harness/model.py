"""The lm-eval model "evictbench": any lm-eval task, answered under an eviction policy.

lm-eval 0.4.13 does not find models of other packages. `evictbench-lm-eval` (cli.py) is its command line with this model
registered; in Python, `import evictbench.harness.model` registers it for `simple_evaluate(model="evictbench", ...)`:

    evictbench-lm-eval --model evictbench --model_args policy=h2o,budget=512 --tasks gsm8k_cot

A policy's settings follow its name as everywhere, but with semicolons, because lm-eval splits arguments at commas:
`--model_args 'policy=snapkv:window=16;kernel=5,budget=256'`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 (lm-eval registers its own models only while no other is)
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model

from evictbench import registry
from evictbench.errors import UserError, unknown
from evictbench.evaluation import thinking
from evictbench.evaluation.settings import CHOICES
from evictbench.generation.end_tokens import end_tokens
from evictbench.generation.generator import Generator, Request
from evictbench.generation.loglikelihood import Choice, ChoiceScorer
from evictbench.harness.arguments import encode_text, generation_settings, render_chat
from evictbench.models import bundled, load
from evictbench.models.ready import ready_policy
from evictbench.numerals import MOST, MOST_SEED, read_whole, shown
from evictbench.store import run_folder
from evictbench.suite import chat_template as chat_templates

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEVICE_OF_LM_EVAL = "cuda:0"
"""The device that lm-eval's command line passes where no --device is given; read as "auto"."""

CACHE_OWNER = "evictbench"
"""The key in a response cache under which the hash of its owner's fingerprint stands."""

ARGUMENTS = (
    *("pretrained", "policy", "budget", "prefill", "chunk", "batch_size", "dtype", "device"),
    *("max_length", "thinking", "seed", "trust_remote_code"),
)
"""Model arguments, as the sentence for an unknown one lists them."""


@register_model("evictbench")
class EvictBenchLM(TemplateLM):  # type: ignore[misc]
    """A model under an eviction policy, as lm-eval drives it.

    pretrained: the bundled model's name, a folder, or a hub id. policy, budget, weights, prefill, chunk: as for
    `evictbench run`. batch_size: rows decoded together ("auto": 8). max_length: tokens of prompt and answer, the
    model's window at most. thinking: the chat template's switch, "on", "off" or "auto". seed: of sampling.

    A prompt that does not fit is refused, never cut. Raises UserError for anything the user can put right.
    """

    def __init__(
        self,
        pretrained: str = bundled.NAME,
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
        **others: Any,
    ) -> None:
        super().__init__()
        others.pop("max_batch_size", None)  # lm-eval's own, for its search of a batch size
        for name in others:
            raise unknown("model argument", name, ARGUMENTS)
        for name, value in (("prefill", prefill), ("thinking", _word(thinking))):
            if value not in CHOICES[name]:
                raise unknown("value", str(value), CHOICES[name], f" of {name}")
        chosen = registry.parse_policy(str(policy).replace(";", ","))
        self.budget = chosen.policy.read_budget(budget)
        self.source = load.resolve(str(pretrained))
        config = load.load_config(self.source, trust_remote_code)
        ready = ready_policy(
            chosen,
            config,
            model=self.source.name,
            model_sha256=lambda: load.weights_hash(self.source, trust_remote_code),
            weights=weights,
            model_folder=lambda: load.whole_folder(self.source, trust_remote_code),
        )
        ready.check_budget(self.budget)
        self.policy, trained = ready.policy, ready.weights
        window = load.context_window(config)
        self.max_length = min(_whole("max_length", max_length or window), window)
        self.tokenizer = load.load_tokenizer(self.source, trust_remote_code)
        load.check_vocabulary(self.tokenizer, config, self.source.name)
        self.seed = _whole("seed", seed, MOST_SEED)
        self._switch = _word(thinking)
        self._thinking: Any = None
        self._template_text: str | None = None
        self.model = load.load_model(self.source, str(device), str(dtype), trust_remote_code)
        self._device = self.model.device
        settings: dict[str, Any] = {
            "prefill": prefill,
            "chunk": _whole("chunk", chunk),
            "batch_size": 8 if str(batch_size).startswith("auto") else _whole("batch_size", batch_size),
        }
        ends = end_tokens(getattr(self.model.generation_config, "eos_token_id", None), self.tokenizer)
        self._generator = Generator(
            self.model, self.tokenizer, self.policy, self.budget, seed=self.seed, ends=ends.ids, **settings
        )
        self._scorer = ChoiceScorer(self.model, self.policy, self.budget, **settings)
        self.fingerprint = {
            "model": self.source.name,
            "weights": load.weights_hash(self.source, trust_remote_code),
            "dtype": str(self.model.dtype),
            "policy": {"name": chosen.name, "settings": chosen.settings, "source": chosen.source},
            "budget": None if self.budget is None else str(self.budget),
            "prefill": prefill,
            "chunk": _whole("chunk", chunk),
            "thinking": self._switch,
            **({} if ends.identity is None else {"end_tokens": ends.identity}),
            **({} if trained is None else {"policy_weights": trained.identity}),
        }

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> EvictBenchLM:
        """From "pretrained=MODEL,policy=h2o,budget=512"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> EvictBenchLM:
        """From model arguments. additional_config: lm-eval's own options, used where an argument is not given."""
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
        """The name under which lm-eval caches rendered prompts."""
        return self.source.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; see `encode_text`."""
        if add_special_tokens is None:
            return encode_text(self.tokenizer, string)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template's text, for lm-eval's records. chat_template: its name, or True for the default."""
        if not chat_template:
            return None
        self._choose_template(chat_template if isinstance(chat_template, str) else None)
        return self._template_text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the prompt's text."""
        self._choose_template(None)
        return render_chat(self.tokenizer, chat_history, add_generation_prompt)

    def _choose_template(self, name: str | None) -> None:
        """Make the chat template ready when it is first asked for. name: None for the default one."""
        if self._thinking is not None:
            return
        if not chat_templates.has_chat_template(self.tokenizer):
            raise UserError(f"The tokenizer of {self.source.name} has no chat template: drop --apply_chat_template.")
        chosen = chat_templates.choose(self.tokenizer, name, self.source.name)
        self._template_text = chosen.text
        self._thinking = thinking.set_switch(self.tokenizer, self._switch, self.source.name)
        if chosen.identity is not None:
            self.fingerprint["chat_template"] = chosen.identity

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use lm-eval's response cache (--use_cache) if its answers come from this model, policy and budget.

        lm-eval keys answers by prompt and generation settings alone, so without the check one policy would be given
        another's answers. Raises UserError for such a cache.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            own, owner = run_folder.fingerprint_hash(self.fingerprint), answers.get(CACHE_OWNER)
            if owner is None and len(answers) == 0:
                answers[CACHE_OWNER] = own
            elif owner != own:
                raise UserError(
                    f"The response cache {answers.filename} holds answers of another model, policy or budget: "
                    "give each its own --use_cache path."
                )
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer every prompt. Raises UserError, before the first answer, for one too long or not offered."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        own_requests = list(self._requests(requests))
        texts: dict[int, str] = {}
        with tqdm(total=len(own_requests), desc="Generating under the policy", disable=disable_tqdm) as bar:
            for completion in self._generator.run(own_requests):
                index = completion.key
                assert isinstance(index, int)
                text = completion.text
                if own_requests[index].thinking:
                    text = thinking.strip_thought(text, self._thinking.opened).text
                texts[index] = text
                if own_requests[index].sampling.temperature == 0:
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update()
        return [texts[index] for index in range(len(own_requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would give it."""
        for request in requests:
            if not request.args[0]:
                raise UserError(
                    f"{_named(request)} asks for a continuation of an empty context, and there is nothing to evict "
                    "from: such metrics (mutual information) are not offered under a policy."
                )
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Raises UserError: a text without a prompt has no budget to keep to."""
        raise UserError(
            "Rolling log-likelihood scores whole texts without a prompt, which says nothing about eviction: "
            "use `evictbench run --suite fidelity` for perplexity under a policy."
        )

    def choices(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Choice]:
        """Pairs of context and continuation (token ids) as choices, keyed by number and grouped by context.

        Raises UserError for a pair that is longer than the window.
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

        scores: dict[int, tuple[float, bool]] = {}
        choices = self.choices([(context, continuation) for _, context, continuation in requests])
        with tqdm(total=len(requests), desc="Scoring under the policy", disable=disable_tqdm) as bar:
            for scored in self._scorer.run(choices):
                assert isinstance(scored.key, int)
                scores[scored.key] = (scored.logprob, scored.greedy)
                self.cache_hook.add_partial("loglikelihood", requests[scored.key][0], scores[scored.key])
                bar.update()
        return [scores[number] for number in range(len(requests))]

    def _requests(self, instances: Sequence[Instance]) -> Iterator[Request]:
        """lm-eval's requests as the engine's, keyed by their index."""
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
            sample_bits = int.from_bytes(hashlib.sha256(repr(sample).encode()).digest()[:8])
            yield Request(
                key=index,
                prompt=tuple(prompt),
                border=None,
                max_new_tokens=limit,
                stop=stop,
                sampling=sampling,
                draw=(sample_bits, repeats[sample]),
                thinking=self._thinking is not None and self._thinking.on,
            )
            repeats[sample] += 1


def _named(instance: Instance) -> str:
    return f"{instance.task_name}, sample {instance.doc_id}"


def _whole(name: str, value: Any, most: int = MOST) -> int:
    """A whole number of the model's arguments, which lm-eval hands over as a number or as text."""
    try:
        return read_whole(str(value), most)
    except ValueError as error:
        raise UserError(f"The model argument {name} takes {error}, and not {shown(value)!r}.") from None


def _word(value: Any) -> str:
    """A switch's word: lm-eval reads "true" and "false" as booleans, "on" and "off" as text."""
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
