"""What a learned policy brings to its training: the contract between `evictbench train` and a policy's own loss.

A policy that can be trained has a method `learner(shape: ModelShape, training: Training) -> Learner`, and may have the
class attributes `Recipe`, a frozen dataclass of what its training can be told (`--recipe ratio=8,ramp=500`), and
`texts`, names of its own training texts (`--data NAME`) to "module:function", where function(tokenizer, length, seed)
yields strings. The loop (`evictbench.train.run`) feeds it, steps its parameters, keeps
checkpoints and saves what `export` gives. A stored learner needs only features of the frozen model: they are computed
once per text, kept on the disk and read back at every step, so that no forward pass is in the loop. One that is not
stored gets the model itself, frozen, and makes its own pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from evictbench.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    pass
    pass


Features = Mapping[str, "Tensor"]
"""Named tensors whose first dimension runs over the rows of a batch."""


@dataclass(frozen=True)
class Training:
    """What a learner is made for: the options of the training that it may depend on.

    window: protected recent tokens; budgets: those that batches draw from; length: tokens of a block, at most; recipe:
    an instance of the policy's `Recipe`; model: the config of the model's text part (hidden_size, rms_norm_eps, ...).
    """

    window: int
    budgets: tuple[int, ...]
    length: int
    steps: int
    seed: int
    recipe: Any
    model: PretrainedConfig


@dataclass
class Losses:
    """One batch's loss. total: a scalar with a graph. parts: what is logged beside it (its terms, the recall of the
    teacher's choice, ...); plain numbers."""

    total: Tensor
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Batch:
    """Some blocks of text, all of one length, as a learner's loss sees them.

    tokens: `[rows, S]` int64, on the learner's device; no padding.
    budget: entries per KV head that a query may see, drawn for this batch from those asked for; window: the protected
    recent tokens. step counts from 0, steps is how many there will be.
    generator: for whatever noise the loss needs, on the learner's device; the same for the same (seed, step, process).
    features: a stored learner's, `[rows, ...]`: on the CPU and memory-mapped, floating ones in float16 or bfloat16, so
    move and convert what is used (in `--finetune` they are what the student's pass saw, on its device).
    model: the frozen base model, attending through `evictbench.cache.attention`; None while a stored learner is trained
    from its store.
    teacher: call it for the frozen model's dense logits `[rows, S, vocabulary]`, without a graph; computed once.
    """

    tokens: Tensor
    step: int
    steps: int
    budget: int
    window: int
    generator: torch.Generator
    features: Features | None = None
    model: PreTrainedModel | None = None
    teacher: Callable[[], Tensor] | None = None


class Student(Protocol):
    """One sparse pass of the model that is being fine-tuned, as its learner follows it."""

    def visible(self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Visible:
        """Which keys each query sees in this layer. Asked once a layer, in order, without a graph.

        query `[rows, heads, S, head_dim]` and key `[rows, kv_heads, S, head_dim]` are rotated; value as key.
        """

    def features(self) -> Features | None:
        """The tensors that the loss needs, detached; None if this pass has nothing to learn from."""


class Learner(nn.Module):
    """The trainable side of a policy, for one model shape. Its parameters are what scorer training steps.

    stored: `loss` needs `batch.features` and nothing of the model. Otherwise it gets `batch.model` and `batch.teacher`.
    held_out: blocks kept out of training by default, for `calibrate` and for the loss at the end.
    finetune_only: it has nothing to train but the model itself.

    Parameters and buffers start on the CPU and are moved by the loop; what training steps but must not be saved, or
    the reverse, is for `export` to sort out. Initialise from torch's global generator: the loop seeds it.
    """

    stored: ClassVar[bool] = False
    held_out: ClassVar[int] = 0
    finetune_only: ClassVar[bool] = False

    def feature_settings(self) -> Mapping[str, Any]:
        """The settings that features depend on beside model and text, such as a window.

        Runs whose settings are equal share stored features. A learner that stores features adds a name of its own.
        """
        return {"learner": f"{type(self).__module__}.{type(self).__qualname__}"}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """Features of blocks `[rows, S]`, from the frozen model, without a graph (stored learners).

        Each `[rows, ...]`; float32 and float64 are kept as float16, other dtypes as they are.
        """
        raise NotImplementedError(f"{type(self).__name__} has no stored features")

    def measure(self, samples: Iterable[Features]) -> None:
        """Set statistics of the inputs (buffers) from the features of some training blocks, one block at a time.

        Once, before the first step; stored learners only.
        """

    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """`measure` for a learner that is not stored, from the frozen model and some training blocks `[1, S]`."""

    def loss(self, batch: Batch) -> Losses:
        """The loss of one batch, a mean over its rows."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to train but the model: use --finetune")

    def attention(self, batch: Batch) -> Student:
        """Follow one sparse pass of the student over this batch (`--finetune`); `batch.features` is None here."""
        raise UserError(f"{type(self).__name__} cannot fine-tune the model: leave out --finetune.")

    def export(self) -> dict[str, Tensor]:
        """The tensors that are saved, and that `Policy.use` takes."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def calibrate(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> Mapping[str, Any]:
        """Measure on held-out blocks `[1, S]` what use needs, such as a table of thresholds. The card keeps it."""
        return {}

    def card(self) -> Mapping[str, Any]:
        """Plain data for the card beside the loop's own record: sizes, limits, `notes` (a list of sentences)."""
        return {}


@dataclass
class Visible:
    """Which keys the queries of one layer see. Position t sees itself always.

    expiry: `[rows, kv_heads or 1, S]` int64, the first query that no longer sees each key; above S: never.
    penalty: `[rows, kv_heads or 1, S]`, added to a key's logits for queries more than `window` after it (a soft gate,
    as log of the probability of staying); None: nothing.
    sinks, shift, inv_freq: the first `sinks` keys are seen `shift` `[S]` positions nearer than they are (StreamingLLM);
    0: where they are.
    """

    expiry: Tensor
    penalty: Tensor | None = None
    window: int = 0
    sinks: int = 0
    shift: Tensor | None = None
    inv_freq: Tensor | None = None
