"""TOVA: drop the token to which the last query attends least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictbench.policy import GROUP_DIM, Policy, Step
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor


class TOVA(Policy):
    """Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 4.

    The score is the softmax row of the last query, averaged over all query heads of the layer. The KV heads of a layer
    share one kept set. Nothing is protected: the newest token may be evicted. A prompt is cut once, by its last query.
    """

    name = "tova"
    summary = "drops what the last query attends to least, one set per layer"
    paper = "arXiv 2401.06104"
    plot_style = PlotStyle("#ba9864", "^", place=4)
    signals = frozenset({"last_query_probs"})
    granularity = "layer"

    def score(self, step: Step) -> Tensor:
        """The last query's attention, the mean over the layer's query heads, `[rows, 1, slots]`."""
        probs = step.signals.last_query_probs
        assert probs is not None
        return probs.mean(dim=(1, GROUP_DIM)).unsqueeze(1)
