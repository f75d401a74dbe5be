"""A suite, a policy, a model and a generator for tests: small, and made of the same parts as the real ones."""

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evictbench.errors import UserError
from evictbench.policy import Policy
from evictbench.suite import PreparedSuite, Suite

HERE = Path(__file__).parent
WORDS = HERE / "toy_tasks" / "toy_data.py"


@dataclass(frozen=True)
class HoardSettings:
    size: int = 3
    decay: float = 0.5
    warm: bool = True
    group: Literal["mean", "max"] = "mean"
    name: str = "plain"
    least: int | None = None

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"hoard: size has to be at least 1, not {self.size}.")
        if self.decay < 0:
            raise ValueError("decay is negative")


class Hoard(Policy):
    """Keeps what it likes."""

    name = "hoard"
    summary = "keeps what it likes"
    paper = "none"
    Config = HoardSettings
    prefill = "bounded"

    @property
    def sinks(self):
        return self.config.size

    def score(self, step):
        return step.positions.float()


def prepare(request):
    tasks = request.tasks or ("toy_recall", "toy_pairs")
    text = WORDS.read_bytes()
    return PreparedSuite(
        tasks=tasks,
        metadata={"samples": request.limit or 4, "seed": request.seed},
        skipped={} if request.tasks else {"toy_songs": "no songs in --data-dir."},
        data={"words": hashlib.sha256(text).hexdigest()[:12]},
    )


TOY = Suite(
    name="toy",
    summary="a few words to be told back",
    folder=HERE / "toy_tasks",
    tasks=("toy_recall", "toy_pairs", "toy_songs"),
    question="unseen",
    context_field="context",
    default_context=256,
    default_limit=4,
    prepare=prepare,
)


def make_tokenizer(template_bos=True, text_bos=True, eos=False, trim_offsets=None):
    """A byte-level tokenizer whose template emits BOS and whose post-processor adds it too, if so asked."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for pair in (("w", "o"), ("r", "d"), ("wo", "rd"), (".", "Ċ"), ("Ġ", "word"), ("Ġ", "Ġ")):
        merges.append(pair)
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<user>", "<bot>"])
    steps = [] if trim_offsets is None else [processors.ByteLevel(trim_offsets=trim_offsets)]
    if text_bos or eos:
        whole = ("<s> " if text_bos else "") + "$A" + (" </s>" if eos else "")
        special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
        steps.append(processors.TemplateProcessing(single=whole, special_tokens=special))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=512)
    fast.chat_template = (
        ("{{ bos_token }}" if template_bos else "")
        + "{% for message in messages %}{{ '<user>' if message['role'] == 'user' else '<bot>' }}"
        + "{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
        + "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return fast


def make_model(folder, weights=True, window=512, **config):
    """A local model folder: a tokenizer, a config and, unless told otherwise, random float32 weights."""
    from transformers import LlamaConfig

    folder = Path(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": window,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
    }
    made = LlamaConfig(**(sizes | config))
    if weights:
        import torch
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(made).save_pretrained(folder)
    else:
        made.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a whole file of no tensors
    return folder


class FakeGenerator:
    """Answers right, half right or wrong, as a hash of the prompt says; in batches whose rows end out of order."""

    def __init__(self, tokenizer, pause=0.0, occupancy=9, fail_at=None, seen=None):
        self.tokenizer = tokenizer
        self.pause = pause
        self.occupancy = occupancy
        self.fail_at = fail_at
        self.seen = [] if seen is None else seen

    def run(self, requests):
        batch = []
        for request in requests:
            batch.append(request)
            if len(batch) == 3:
                yield from reversed([self.answer(one) for one in batch])
                batch = []
        yield from reversed([self.answer(one) for one in batch])

    def answer(self, request):
        from evictbench.generation.generator import Completion

        if self.fail_at is not None and len(self.seen) >= self.fail_at:
            raise RuntimeError("the machine\nhas caught fire")
        self.seen.append(request)
        time.sleep(self.pause)
        text = self.tokenizer.decode(request.prompt)
        words = text.split("Remember this. ")[1].split(" Blue")[0].split()
        luck = int(hashlib.sha256(repr(request.prompt).encode()).hexdigest(), 16) % 3
        answer = " " + " ".join(words[: len(words) if luck == 2 else luck] or ["no", "idea"])
        tokens = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        known = {
            "key": request.key,
            "tokens": tuple(tokens),
            "text": answer,
            "truncated": luck == 0,
            "occupancy_max": self.occupancy,
            "occupancy_mean": self.occupancy - 0.5,
            "cache_bytes": 2000,
            "prefill_peak_bytes": 5_000_000,
            "prefill_seconds": 0.25,
            "recency": None,
            "first_token_seconds": 0.3,
            "decode_seconds": 0.5,
            "decode_steps": max(len(tokens) - 1, 0),
        }
        fields = {field.name for field in dataclasses.fields(Completion)}
        assert fields == known.keys(), fields ^ known.keys()
        return Completion(**known)


def install_fake_generator():
    """Let `evictbench run` generate with the fake one; FAKE_PAUSE is in seconds, FAKE_LOG a file of its requests."""
    from evictbench.evaluation import run

    def load(plan):
        log = os.environ.get("FAKE_LOG")
        if log:
            with open(log, "a") as file:
                file.write(json.dumps({"budget": plan.fingerprint["budget"]}) + "\n")
        return FakeGenerator(plan.tokenizer, pause=float(os.environ.get("FAKE_PAUSE", "0"))), "cpu"

    run.load_generator = load
