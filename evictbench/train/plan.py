"""From the options of a training to what is trained on what: all that can be checked before a weight is loaded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from evictbench.errors import UserError
from evictbench.models import devices, load
from evictbench.policy.learner import Learner, Training
from evictbench.policy.step import ModelShape
from evictbench.train.data import Blocks, make_blocks, read_texts
from evictbench.train.settings import BLOCKS, Checked, TrainSettings, check, text_makers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDENTITY_VERSION = 1
"""Raised when the same command would train other weights than before."""

_IDENTIFYING = (
    *("steps", "budget", "window", "finetune", "lr", "model_lr", "length", "no_pack"),
    *("batch_size", "accumulate", "seed", "dtype"),
)
"""Options that change what is trained; the device, the store and the time between checkpoints do not."""


@dataclass(frozen=True)
class TrainPlan:
    """One training, ready to begin.

    model: the name in results; sha256: of the model's weights; dtype: of its weights, the checkpoint's own where the
    settings leave it to that; names: where the texts come from; train_blocks: how many of the blocks are trained on,
    the rest are held out; identity: what must be equal for a folder's training to go on.
    """

    settings: TrainSettings
    checked: Checked
    source: load.Source
    model: str
    sha256: str
    shape: ModelShape
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    learner: Learner
    blocks: Blocks
    names: tuple[str, ...]
    train_blocks: int
    identity: Mapping[str, Any]

    @property
    def held_out(self) -> range:
        """The blocks that are not trained on."""
        return range(self.train_blocks, len(self.blocks))


def make_plan(settings: TrainSettings, processes: int, phase: Callable[[str], None] = lambda _: None) -> TrainPlan:
    """Check everything, and make the learner and the blocks.

    Checked in this order: names, numbers, paths; the model's tokenizer and config; the learner; the texts; the weights'
    hash. processes: how many train together. phase: is told what takes long. Raises UserError for what cannot be.
    """
    checked = check(settings)
    source = load.resolve(settings.model)
    model = source.result_name
    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    config = load.load_config(source, settings.trust_remote_code)
    load.check_supported(config)
    window = load.context_window(config)
    if settings.length > window:
        raise UserError(f"Blocks of {settings.length} tokens are longer than the window of {model}, {window} tokens.")
    tokenizer = load.load_tokenizer(source, settings.trust_remote_code)
    load.check_vocabulary(tokenizer, config, model)
    shape = ModelShape.of(config)
    learner = _make_learner(settings, checked, config, shape)

    phase("reading the texts")
    held_out = learner.held_out if settings.held_out is None else settings.held_out
    needed = settings.steps * settings.accumulate * settings.batch_size * processes
    most = needed if settings.blocks is None else min(needed, settings.blocks)
    texts = read_texts(settings.data, text_makers(checked.policy), tokenizer, settings.length, settings.seed)
    phase("cutting them into blocks")
    blocks = make_blocks(
        texts,
        tokenizer,
        settings.out / BLOCKS,
        length=settings.length,
        pack=not settings.no_pack,
        most=most + held_out,
        seed=settings.seed,
    )
    if len(blocks) <= held_out:
        raise UserError(
            f"The texts fill {len(blocks)} blocks of {settings.length} tokens, and {held_out} are to be held out: give "
            "more, or a smaller --length or --held-out."
        )
    phase("identifying the weights")
    sha256 = load.weights_hash(source, settings.trust_remote_code)
    identity = {
        "version": IDENTITY_VERSION,
        "policy": {"label": checked.chosen.label, "settings": checked.chosen.settings, "source": checked.chosen.source},
        "recipe": asdict(checked.recipe),
        "model": model,
        "weights": sha256,
        "data": blocks.sha256,
        "held_out": held_out,
        "processes": processes,
        **{name: getattr(settings, name) for name in _IDENTIFYING},
    }
    return TrainPlan(
        settings=settings,
        checked=checked,
        source=source,
        model=model,
        sha256=sha256,
        shape=shape,
        dtype=load.resolve_dtype(config, settings.dtype),
        tokenizer=tokenizer,
        learner=learner,
        blocks=blocks,
        names=texts.names,
        train_blocks=len(blocks) - held_out,
        identity=identity,
    )


@dataclass
class BlockOrder:
    """The order in which a training sees its blocks: drawn anew for every epoch, the processes taking turns.

    count: blocks to train on; rows: blocks in one forward pass; passes: forward passes of one process in one step;
    processes: how many there are, and process: this one's number, from 0.
    """

    seed: int
    count: int
    rows: int
    passes: int
    processes: int
    process: int
    _epochs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def per_step(self) -> int:
        """Blocks of one step, all processes together."""
        return self.rows * self.passes * self.processes

    def batches(self, step: int) -> Iterator[list[int]]:
        """The blocks of each forward pass of this process in a step."""
        for number in range(self.passes):
            first = step * self.per_step + (number * self.processes + self.process) * self.rows
            yield [self.block(first + row) for row in range(self.rows)]

    def block(self, index: int) -> int:
        """The block that comes at an index of the whole training, counted from 0."""
        epoch, within = divmod(index, self.count)
        if epoch not in self._epochs:
            order = list(range(self.count))
            random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
            if len(self._epochs) > 1:  # a step may lie across two of them
                self._epochs.pop(min(self._epochs))
            self._epochs[epoch] = order
        return self._epochs[epoch][within]

    def blocks_seen(self, steps: int, at_least: int) -> list[int]:
        """The blocks that so many steps see, ascending; the first `at_least` of the order are always among them."""
        count = min(self.count, max(self.per_step * steps, at_least))
        return sorted(self.block(index) for index in range(count))


def draw_budget(seed: int, step: int, name: str, budgets: Sequence[int]) -> int:
    """The budget of one forward pass of a step. name: tells the pass from others in the same step."""
    return random.Random(derive_seed(seed, "budget", step, name)).choice(list(budgets))


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits made from numbers and words, the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _make_learner(settings: TrainSettings, checked: Checked, config: Any, shape: ModelShape) -> Learner:
    torch.manual_seed(settings.seed)
    policy: Any = checked.policy
    learner = policy.learner(
        shape,
        Training(
            window=settings.window,
            budgets=checked.budgets,
            length=settings.length,
            steps=settings.steps,
            seed=settings.seed,
            recipe=checked.recipe,
            model=config.get_text_config(decoder=True),
        ),
    )
    name = checked.chosen.name
    if not isinstance(learner, Learner):
        raise UserError(
            f"The learner of {name} is not an evictbench.policy.learner.Learner but a {type(learner).__name__}."
        )
    if learner.finetune_only and not settings.finetune:
        raise UserError(f"{name} has no scorer to train: with --finetune the model learns to live with it.")
    if settings.finetune and type(learner).attention is Learner.attention:
        raise UserError(f"{name} trains its own part alone, beside a frozen model: leave out --finetune.")
    if not learner.finetune_only and not any(parameter.requires_grad for parameter in learner.parameters()):
        raise UserError(f"The learner of {name} has no parameters to train.")
    return learner
