"""DMS: a gate marks single tokens, and a marked token is evicted when it leaves the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import ModelShape, NewEntries, RaggedPolicy
from evictbench.policy.plot_style import DASH_DOT, PlotStyle

from .allotment import OFF, Calibration
from .checkpoint import ADAPTERS, Options
from .gate import BorrowedGate, SeparateGate
from .recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy import Activation
    from evictbench.policy.learner import Learner, Training


@dataclass(frozen=True)
class Settings:
    """window: a marked token at t is seen by the queries up to t + window. sinks: first positions, never evicted. gate:
    "separate" (trained weights beside a frozen model), "borrowed" (a channel of the queries of a model that was trained
    so), or "auto": what the model's config says, adapters in its own checkpoint (`dms_separate_alpha`) or a borrowed
    channel (`dms_window_size` alone), and separate where it says nothing. alpha_per: each KV "head" decides
    for itself, or all heads of a "layer" together. None: the value of the model's config or the weights' card.
    """

    window: int | None = None
    sinks: int | None = None
    gate: Literal["auto", "separate", "borrowed"] = "auto"
    alpha_per: Literal["head", "layer"] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"dms: window must be 1 or more, not {self.window}.")
        if self.sinks is not None and self.sinks < 0:
            raise UserError(f"dms: sinks must be 0 or more, not {self.sinks}.")


class DMS(RaggedPolicy):
    """Łańcucki et al., arXiv 2506.05345 (NeurIPS 2025), and the authors' inference code (Model-Optimizer, dms).

    The logit z read at token t + 1 governs token t: z > threshold marks it, and a marked entry is seen by queries up to
    t + window and by none after them; its slot then takes a new entry. Each head keeps as many entries as it does not
    mark, in the prompt and in decode. Only the window and `sinks` first positions are protected.

    Deviations: the threshold is 0, as published, only for a budget of the share that the model was trained for. Another
    budget moves it, by the calibration in the weights' card, so that one gate serves many shares; the threshold is
    chosen for the length of each row's prompt. The authors train one checkpoint for each ratio, and a share far from
    the trained one wants its own too: tokens are put in order where the noise of the training has its density, near the
    threshold 0. At the bundled gate's thresholds for half of 729 tokens (7.2) and an eighth of 1,024 (-6.1) that
    density is below 1% of its maximum. A prompt is read under eviction, as published, whatever prefill is asked for.
    Decisions are computed in float32, the authors' in the model's dtype. The official cache stores blocks of 256
    entries, this one pages of 16. A budget of the whole text switches eviction off; a borrowed channel is zeroed even
    then.
    """

    name = "dms"
    summary = "a trained gate marks tokens, which are dropped when they leave the window; heads differ in length"
    paper = "arXiv 2506.05345"
    plot_style = PlotStyle("#b62703", "v", DASH_DOT, place=7)
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    prefill = "bounded"
    learned = True
    checkpoint = ADAPTERS

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._window: int | None = self.config.window
        self._sinks: int | None = self.config.sinks
        self._alpha_per: Literal["head", "layer"] | None = self.config.alpha_per
        self._calibration: Calibration | None = None
        self._gate: SeparateGate | BorrowedGate | None = None
        self._gate_on: dict[torch.device, SeparateGate] = {}

    @property
    def enforces_budget(self) -> bool:
        """False: a budget sets the threshold, and a row holds what the gate then keeps."""
        return False

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return self._sinks or 0

    @property
    def reach(self) -> int:
        """The window: a marked token at t is seen by queries up to t + reach. UserError: there is none."""
        if self._window is None:
            raise UserError("dms has no window: the model's config names none, so give one, as in dms:window=256.")
        return self._window

    @property
    def borrowed(self) -> bool:
        """Whether the gate is a channel of the model's own queries; no weights are needed then."""
        return self.config.gate == "borrowed" or isinstance(self._gate, BorrowedGate)

    @property
    def hooks(self) -> frozenset[Activation]:
        """The activation that the gate reads: a layer's input if separate, its queries before rotation if borrowed."""
        return frozenset({"pre_rope_queries"} if self.borrowed else {"residual"})

    def minimum_budget(self, shape: ModelShape) -> int:
        """1: `allot` checks a budget against the calibration."""
        return 1

    def fit(self, config: Any) -> None:
        """Take from the config of a checkpoint that was trained with DMS where its gate is, and what a borrowed channel
        needs: window, scale, offset, and the ratio that it was trained for. UserError for options that DMS cannot have.
        """
        options = Options.of(config.get_text_config(decoder=True))
        if options.separate and self.config.gate == "borrowed":
            raise UserError(
                "dms: gate=borrowed is not possible with this model, whose gate is in adapters (dms_separate_alpha)."
            )
        if options.separate:
            self.weights_in_model = True
            return
        if self.config.gate == "separate" or (options.window is None and self.config.gate != "borrowed"):
            return
        if self._window is None:
            self._window = options.window
        if self._alpha_per is None:
            self._alpha_per = options.per
        self.learned = False
        self._gate = BorrowedGate(
            ModelShape.of(config).kv_heads,
            shared=self._alpha_per == "layer",
            scale=options.scale,
            offset=options.offset,
        )
        if self._calibration is None and options.ratio:
            self._calibration = Calibration.published(options.ratio)

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take the separate gate's weight `[layers, kv_heads, hidden]` and bias `[layers, kv_heads]`, and the card's
        window, sinks and calibration where the settings leave them open. UserError: the weights do not fit."""
        card: Mapping[str, Any] = {**weights.card, **(weights.card.get("settings") or {})}
        weight, bias = (weights.tensors.get(name) for name in ("weight", "bias"))
        expected = (shape.layers, shape.kv_heads)
        fits = weight is not None and weight.dim() == 3 and tuple(weight.shape[:2]) == expected
        if weight is None or bias is None or not fits or tuple(bias.shape) != expected:
            raise UserError(
                f"The weights {weights.origin} are not a gate of {shape.layers} layers with {shape.kv_heads} KV heads."
            )
        unread = sorted(weights.tensors.keys() - {"weight", "bias"})
        if unread:
            raise UserError(f"The weights {weights.origin} hold {unread[0]}, which a gate has no place for.")
        if shape.hidden_size and weight.shape[2] != shape.hidden_size:
            raise UserError(
                f"The weights {weights.origin} read hidden states of width {weight.shape[2]}, and this model's have "
                f"{shape.hidden_size}."
            )
        self._gate_on = {}
        self._gate = SeparateGate(weight.float(), bias.float(), float(card.get("epsilon", 1e-6)))
        if self._window is None and card.get("window") is not None:
            self._window = int(card["window"])
        if self._sinks is None:
            self._sinks = int(card.get("sinks", 0))
        if self._alpha_per is None:
            self._alpha_per = card.get("alpha_per", "head")
        if weights.card.get("calibration"):
            self._calibration = Calibration.of(weights.card["calibration"])
        elif weights.card.get("ratio"):
            self._calibration = Calibration.published(float(weights.card["ratio"]))

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """The trainable side: the separate gate."""
        from .learner import DMSLearner

        return DMSLearner(shape, training)

    def allot(self, share: float, length: int) -> float:
        """The threshold that keeps a share of a text of `length` tokens, by the calibration; OFF for a share of 1.

        Raises UserError for a share that the calibration does not reach.
        """
        if share >= 1:
            return OFF
        if self._calibration is None:
            raise UserError(
                "dms knows no threshold for a budget: its weights' card has no calibration, and the model's config no "
                "dms_cr. Only --budget 100% can be had, which evicts nothing."
            )
        return self._calibration.threshold(share, length, protected=self.sinks + self.reach + 1)

    def read(self, layer: int, name: Activation, tensor: Tensor) -> Tensor:
        """The gate's logits `[rows, kv_heads, new]` from a layer's activation. UserError: there are no weights."""
        if self._gate is None:
            raise UserError("dms with a separate gate needs trained weights (--weights), and has none.")
        if isinstance(self._gate, BorrowedGate):
            return self._gate.logits(tensor)
        z = self._separate(self._gate, tensor.device).logits(layer, tensor)
        return z[:, :1].expand_as(z) if self._alpha_per == "layer" else z

    def read_layers(self, layers: Sequence[int], name: Activation, tensors: Sequence[Tensor]) -> Tensor:
        """`read` for one new token and several layers, `[layers, rows, kv_heads, 1]`; one product if separate."""
        if not isinstance(self._gate, SeparateGate):
            return super().read_layers(layers, name, tensors)
        import torch

        z = self._separate(self._gate, tensors[0].device).logits_of_layers(layers, torch.stack(list(tensors)))
        return z[:, :, :1].expand_as(z) if self._alpha_per == "layer" else z

    def _separate(self, gate: SeparateGate, device: torch.device) -> SeparateGate:
        """The separate gate on a device."""
        if device not in self._gate_on:
            self._gate_on[device] = replace(gate, weight=gate.weight.to(device), bias=gate.bias.to(device))
        return self._gate_on[device]

    def before_rotation(self, queries: Tensor) -> Tensor | None:
        """The queries `[rows, tokens, heads, head_dim]` with the borrowed channel zeroed; None: unchanged."""
        return self._gate.without_channel(queries, heads_at=2) if isinstance(self._gate, BorrowedGate) else None

    def after_rotation(self, queries: Tensor) -> Tensor:
        """The queries `[rows, heads, tokens, head_dim]` with the channel zeroed again: the rotation mixes channels."""
        return self._gate.without_channel(queries, heads_at=1) if isinstance(self._gate, BorrowedGate) else queries

    def expiry(self, entries: NewEntries) -> Tensor:
        """The expiry of the token before the new ones and of each new one, `[rows, kv_heads, 1 + new]`."""
        assert entries.activation is not None
        assert entries.threshold is not None
        marks = entries.activation > entries.threshold[:, None, None]
        return expiry_of_marks(marks, entries.positions, self.sinks, self.reach)

    def expiry_of_layers(self, entries: Sequence[NewEntries]) -> Tensor:
        """`expiry` for one new token and several layers, `[layers, rows, kv_heads, 2]`."""
        import torch

        first = entries[0]
        assert first.threshold is not None
        logits = torch.stack([layer.activation for layer in entries if layer.activation is not None])
        marks = logits > first.threshold[:, None, None]
        return expiry_of_marks(marks, first.positions, self.sinks, self.reach)


def expiry_of_marks(marks: Tensor, positions: Tensor, sinks: int, window: int) -> Tensor:
    """The expiry of the token before the new ones and of each new one, `[rows, kv_heads, 1 + new]` int32.

    marks: `[rows, kv_heads, new]` bool, or `[layers, rows, kv_heads, 1]`. The mark at position p governs the token at
    p - 1, which is then seen by queries up to p - 1 + window; without a mark the expiry is NEVER. positions: `[rows,
    new]`, -1 for padding in front. sinks: first positions that no mark concerns.
    """
    import torch

    from evictbench.policy import NEVER

    expires = torch.where(marks & (positions > sinks)[:, None], (positions + window)[:, None], NEVER).to(torch.int32)
    if positions.shape[1] == 1:
        return torch.cat((expires, torch.full_like(expires, NEVER)), dim=-1)
    first = (positions < 0).sum(-1).clamp(max=positions.shape[1] - 1)
    before = expires.gather(2, first[:, None, None].expand(-1, marks.shape[1], 1))
    return torch.cat((before, expires[:, :, 1:], torch.full_like(before, NEVER)), dim=-1)
