"""From the options of a training to what is trained on what: all that can be checked before a weight is loaded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError
from evictbench.models import devices, load
from evictbench.policy.learner import Learner, Training
from evictbench.policy.step import ModelShape
from evictbench.train.data import Blocks, make_blocks, read_texts
from evictbench.train.settings import BLOCKS, Checked, Settings, check, own_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


IDENTITY_VERSION = 1
"""Raised when the same command would train other weights than before."""


@dataclass(frozen=True)
class Plan:
    """One training, ready to begin.

    model: the name in results; dtype: of its weights, the checkpoint's own where the settings leave it to that;
    train_blocks: how many of the blocks are trained on, the rest are held out; identity: what a folder's training must
    agree in to go on.
    """

    settings: Settings
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


def make_plan(settings: Settings, processes: int, phase: Callable[[str], None] = lambda _: None) -> Plan:
    """Check everything, make the learner and the blocks; UserError says what cannot be. `phase` hears what takes long.

    In this order: names, numbers, paths; the model's tokenizer and config; the learner; the texts; the weights' hash.
    """
    checked = check(settings)
    source = load.resolve(settings.model)
    model = Path(source.name).expanduser().resolve().name if source.kind == "local" else source.name
    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    config = load.load_config(source, settings.trust_remote_code)
    load.check_supported(config)
    window = load.context_window(config)
    if settings.length > window:
        raise UserError(f"Blocks of {settings.length} tokens are longer than the window of {model}, {window} tokens.")
    tokenizer = load.load_tokenizer(source, settings.trust_remote_code)
    shape = ModelShape.of(config)
    learner = _learner(settings, checked, config, shape)

    phase("reading the texts")
    held_out = learner.held_out if settings.held_out is None else settings.held_out
    steps = settings.steps * settings.accumulate * settings.batch_size * processes
    most = steps if settings.blocks is None else min(steps, settings.blocks)
    texts = read_texts(settings.data, own_texts(checked.policy), tokenizer, settings.length, settings.seed)
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
    sha256 = load.weights_hash(source)
    identity = {
        "version": IDENTITY_VERSION,
        "policy": {"label": checked.chosen.label, "settings": checked.chosen.settings, "source": checked.chosen.source},
        "recipe": asdict(checked.recipe),
        "model": model,
        "weights": sha256,
        "data": blocks.sha256,
        "held_out": held_out,
        "processes": processes,
        **{name: getattr(settings, name) for name in _AGREE},
    }
    return Plan(
        settings=settings,
        checked=checked,
        source=source,
        model=model,
        sha256=sha256,
        shape=shape,
        dtype=load.own_dtype(config) if settings.dtype == "auto" else settings.dtype,
        tokenizer=tokenizer,
        learner=learner,
        blocks=blocks,
        names=texts.names,
        train_blocks=len(blocks) - held_out,
        identity=identity,
    )


_AGREE = (
    *("steps", "budget", "window", "finetune", "lr", "model_lr", "length", "no_pack"),
    *("batch_size", "accumulate", "seed", "dtype"),
)
"""Options that change what is trained; the device, the store and how often it is kept do not."""


def _learner(settings: Settings, checked: Checked, config: Any, shape: ModelShape) -> Learner:
    import torch

    torch.manual_seed(settings.seed)
    maker: Any = checked.policy
    learner = maker.learner(
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


def label_settings(chosen: registry.ChosenPolicy) -> dict[str, Any]:
    """The policy's settings that differ from their defaults."""
    default = chosen.policy.Config()
    return {name: value for name, value in chosen.settings.items() if value != getattr(default, name)}


@dataclass
class Order:
    """The blocks of every step. count: blocks to train on; rows: of one pass; passes: of one process in one step.

    Blocks come in an order that is drawn anew for every time round; the processes take turns.
    """

    seed: int
    count: int
    rows: int
    passes: int
    processes: int
    process: int
    _orders: dict[int, list[int]] = field(default_factory=dict)

    @property
    def per_step(self) -> int:
        """Blocks of one step, all processes together."""
        return self.rows * self.passes * self.processes

    def passes_of(self, step: int) -> Iterator[list[int]]:
        """The blocks of each forward pass of this process in a step."""
        for place in range(self.passes):
            first = step * self.per_step + (place * self.processes + self.process) * self.rows
            yield [self.block(first + row) for row in range(self.rows)]

    def block(self, place: int) -> int:
        """The block at a place of the whole training's order."""
        time_round, place = divmod(place, self.count)
        if time_round not in self._orders:
            order = list(range(self.count))
            random.Random(seed_of(self.seed, "order", time_round)).shuffle(order)
            if len(self._orders) > 1:  # a step may lie across two of them
                self._orders.pop(min(self._orders))
            self._orders[time_round] = order
        return self._orders[time_round][place]

    def used(self, steps: int, at_least: int) -> list[int]:
        """The blocks that so many steps see, all of the first `at_least` in order among them."""
        places = min(self.count, max(self.per_step * steps, at_least))
        return sorted(self.block(place) for place in range(places))


def drawn(seed: int, step: int, name: str, budgets: Sequence[int]) -> int:
    """The budget of one pass of a step."""
    return random.Random(seed_of(seed, "budget", step, name)).choice(list(budgets))


def seed_of(*parts: object) -> int:
    """A seed of 63 bits for numbers and words, the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
