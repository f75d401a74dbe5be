"""Policies to train in tests: a stored scorer, one that is not stored, and one that has a model to train alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from evictbench.errors import UserError
from evictbench.models.policy_weights import shape_data
from evictbench.policy import Policy
from evictbench.policy.learner import Learner, Losses, Visible

TOY = f"{Path(__file__)}:Toy"
GATE = f"{Path(__file__)}:ToyGate"


@dataclass(frozen=True)
class Settings:
    label: Literal["mean", "max"] = "mean"


@dataclass(frozen=True)
class Recipe:
    scale: float = 1.0
    fail_at: int = -1


class Scorer(Learner):
    """A linear score of key and value per layer and head, towards what a key's attention from its own position is."""

    stored = True
    held_out = 2

    def __init__(self, shape, training):
        super().__init__()
        self.recipe = training.recipe
        self.weight = torch.nn.Parameter(0.1 * torch.randn(shape.layers, shape.kv_heads, 2 * shape.head_dim))
        self.register_buffer("mean", torch.zeros(shape.layers, shape.kv_heads, 2 * shape.head_dim))

    def features(self, model, tokens):
        seen, target = [], []

        def watch(layer, module, query, key, value, scaling):
            seen.append(torch.cat([key, value], dim=-1))
            own = query.unflatten(1, (key.shape[1], -1)) * key[:, :, None]
            target.append(own.sum(-1).amax(2) * scaling)

        model(input_ids=tokens, use_cache=False, dense_attention=watch)
        return {"x": torch.stack(seen, 1), "target": torch.stack(target, 1)}

    def measure(self, samples):
        self.mean.copy_(torch.stack([sample["x"].double().mean(dim=(0, 3)) for sample in samples]).mean(0))

    def scores(self, x):
        return ((x.to(self.weight.dtype) - self.mean[:, :, None]) * self.weight[:, :, None]).sum(-1)

    def loss(self, batch):
        if batch.step == self.recipe.fail_at:
            return Losses(next(self.parameters()).sum() * torch.nan)
        noise = torch.rand((), generator=batch.generator)
        error = self.scores(batch.features["x"]) - self.recipe.scale * batch.features["target"]
        return Losses(error.square().mean() * (1 + 0.1 * noise), {"recall": float((error.abs() < 1).float().mean())})

    def attention(self, batch):
        return ScoredStudent(self, batch)


class ScoredStudent:
    """A key stays for `budget` queries, twice as long if its score is positive."""

    def __init__(self, learner, batch):
        self.learner, self.batch = learner, batch
        self.seen, self.target, self.asked = {}, {}, []

    def visible(self, layer, module, query, key, value):
        assert not torch.is_grad_enabled()
        self.asked.append(layer)
        x = torch.cat([key, value], dim=-1).float()
        own = query.unflatten(1, (key.shape[1], -1)) * key[:, :, None]
        self.seen[layer], self.target[layer] = x, own.sum(-1).amax(2).float()
        score = ((x - self.learner.mean[layer][:, None]) * self.learner.weight[layer][:, None]).sum(-1)
        stay = torch.where(score > 0, 2 * self.batch.budget, self.batch.budget)
        return Visible(torch.arange(key.shape[2]) + stay)

    def features(self):
        order = sorted(self.seen)
        return {
            "x": torch.stack([self.seen[layer] for layer in order], 1),
            "target": torch.stack([self.target[layer] for layer in order], 1),
        }


class Gate(Learner):
    """Not stored: one number a layer, towards the model's own logits."""

    def __init__(self, shape, training):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(shape.layers))
        self.began = 0

    def begin(self, model, blocks):
        self.began = len(blocks)

    def loss(self, batch):
        def bent(layer, module, query, key, value, scaling):
            value = value * (1 + self.bias[layer])
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )

        logits = batch.model(input_ids=batch.tokens, use_cache=False, dense_attention=bent).logits
        return Losses((logits - 1.1 * batch.teacher()).square().mean(), {"bias": float(self.bias.detach().mean())})

    def calibrate(self, model, blocks):
        return {"seen": len(blocks)}

    def card(self):
        return {"notes": ["It is a toy."]}


class Toy(Policy):
    """A policy with a stored scorer."""

    name = "toy"
    summary = "a toy"
    paper = "-"
    Config = Settings
    Recipe = Recipe
    learned = True
    prefill = "bounded"
    texts = {"toy-words": "toy:words"}  # noqa: RUF012
    kind = Scorer

    @property
    def variant(self):
        return self.config.label

    def learner(self, shape, training):
        return self.kind(shape, training)

    def use(self, weights, shape):
        if weights.tensors["weight"].shape[0] != shape.layers:
            raise UserError(f"Shapes differ from {shape_data(shape)}.")
        self.weight = weights.tensors["weight"]

    def score(self, step):
        return step.positions


class ToyGate(Toy):
    """A policy whose learner needs the model."""

    name = "toy_gate"
    kind = Gate
    transferable = True


def words(tokenizer, length, seed):
    """The policy's own texts."""
    return [f"word {seed} " * length for _ in range(4)]
