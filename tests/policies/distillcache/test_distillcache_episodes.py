"""DistillCache's episodes, against explicit masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training_on_tiny_model import LENGTH, PROMPT, SHARE, STEPS, drawing, probabilities, text

from evictbench.policies.distillcache.rollout import TeacherRun, later_attention
from evictbench.policy.budget import Budget


def masked_logits(model: Any, tokens: list[int], visible: Tensor) -> Tensor:
    """Logits `[tokens, vocabulary]` of one pass in which query u sees the keys `visible[u]`."""

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return (query @ key.mT * scaling).masked_fill(~visible, -torch.inf).softmax(-1) @ value

    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False, dense_attention=attend).logits[0]
    return found


def test_divergence_against_masks(model: Any) -> None:
    """Each student's divergence is that of one pass in which its queries see what it had chosen and themselves."""
    tokens, rows = text(), 3
    with torch.no_grad():
        reading = TeacherRun(model, tokens, PROMPT, SHARE)
        logits, _ = reading.read_on(PROMPT + STEPS)
        episode = reading.decode(logits, rows, drawing())
    whole = tokens[: PROMPT + STEPS]
    causal = torch.ones(len(whole), len(whole), dtype=torch.bool).tril()
    dense = masked_logits(model, whole, causal)[PROMPT:].log_softmax(-1)
    torch.testing.assert_close(logits.log_softmax(-1), dense, rtol=0, atol=1e-9)
    by_first = {decision.choice.first: decision for decision in episode.decisions}
    assert next(iter(by_first)) == 0
    assert 0 < len(by_first) < STEPS + 1  # a share that grows: not every step evicts
    for row in range(rows):
        visible, held = causal.clone(), set(range(PROMPT))
        for step in range(STEPS):
            if step in by_first:
                decision = by_first[step]
                positions = decision.choice.positions.expand(rows, -1)[row]
                assert set(positions.tolist()) == held
                held = set(positions[decision.chosen[row]].tolist())
                assert len(held) == decision.choice.size == SHARE.at(PROMPT, PROMPT + step + 1) - 1
            held.add(PROMPT + step)
            visible[PROMPT + step] = torch.tensor([key in held for key in range(len(whole))])
        student = masked_logits(model, whole, visible)[PROMPT:].log_softmax(-1)
        expected = (dense.exp() * (dense - student)).sum(-1)
        torch.testing.assert_close(episode.kl[row], expected, rtol=0, atol=1e-9)
    assert episode.kl.min() > 1e-4


def test_nothing_evicted(model: Any) -> None:
    """A budget of everything: no choice, no divergence, several rows all the same."""
    with torch.no_grad():
        reading = TeacherRun(model, text(), PROMPT, Budget(share=1.0))
        logits, _ = reading.read_on(PROMPT + STEPS)
        episode = reading.decode(logits, 2, drawing())
    assert not episode.decisions
    assert episode.kl.shape == (2, STEPS)
    assert episode.kl.abs().max() < 1e-9


def test_prompt_is_left_as_it_was(model: Any) -> None:
    """How far the teacher has read on, and who decoded before, changes nothing of an episode."""
    with torch.no_grad():
        reading = TeacherRun(model, text(), PROMPT, SHARE)
        logits, _ = reading.read_on(PROMPT + STEPS)
        first = reading.decode(logits, 2, drawing(3))
        other = TeacherRun(model, text(), PROMPT, SHARE)
        longer, _ = other.read_on(LENGTH)
        other.decode(longer, 2, drawing(8))
        again = other.decode(longer[:STEPS], 2, drawing(3))
    torch.testing.assert_close(again.kl, first.kl, rtol=0, atol=1e-9)
    for mine, theirs in zip(again.decisions, first.decisions, strict=True):
        assert torch.equal(mine.chosen, theirs.chosen)
        assert torch.equal(mine.choice.positions.expand(2, -1), theirs.choice.positions.expand(2, -1))
        torch.testing.assert_close(mine.choice.features, theirs.choice.features, rtol=0, atol=1e-6)


def test_what_the_teacher_attends_to(model: Any) -> None:
    """Rows of attention and their mean from a choice on, against the whole matrix, over more than one ring."""
    tokens = text(length=150)
    with torch.no_grad():
        _, found = TeacherRun(model, tokens, 40, SHARE).read_on(150)
    expected = probabilities(model, tokens).mean((0, 1))[40:]
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)
    positions = torch.tensor([[0, 7, 39], [2, 41, 45]])
    later = later_attention(found, 6, positions)
    torch.testing.assert_close(later, expected[6:].mean(0).float()[positions], rtol=0, atol=1e-6)
    discounted = sum(0.5**wait * row for wait, row in enumerate(expected[6:])) / 2
    later = later_attention(found, 6, positions, 0.5)
    torch.testing.assert_close(later, discounted.float()[positions], rtol=0, atol=1e-6)
