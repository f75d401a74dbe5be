"""From the options of a training to what is trained on what: all that can be checked before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import devices, models, registry
from evictbench.errors import UserError
from evictbench.learner import Learner, Training
from evictbench.policy import ModelShape
from evictbench.train_data import Blocks, make_blocks, read_texts
from evictbench.train_settings import BLOCKS, Checked, Settings, check, own_texts

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
    source: models.Source
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
    source = models.resolve(settings.model)
    model = Path(source.name).expanduser().resolve().name if source.kind == "local" else source.name
    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    config = models.load_config(source, settings.trust_remote_code)
    models.check_supported(config)
    window = models.context_window(config)
    if settings.length > window:
        raise UserError(f"Blocks of {settings.length} tokens are longer than the window of {model}, {window} tokens.")
    tokenizer = models.load_tokenizer(source, settings.trust_remote_code)
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
    sha256 = models.weights_hash(source)
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
        dtype=models.own_dtype(config) if settings.dtype == "auto" else settings.dtype,
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
        raise UserError(f"The learner of {name} is not an evictbench.learner.Learner but a {type(learner).__name__}.")
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
