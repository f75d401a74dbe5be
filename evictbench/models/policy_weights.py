"""Trained weights of a policy: what a folder of them holds, finding one, refusing one that does not fit.

    weights.safetensors   the tensors
    config.json           the card's data: policy, variant, settings, base_model, transferable, training, calibration
    README.md             the card in words, written from config.json
    curves.jsonl          the log of the training

A folder is named on the command line by its path or as a hub id (`--weights`); those that come with evictbench lie in
the package of their policy, in folders under `weights/`, and are found by their cards. A policy whose authors have
released weights in a layout of their own may say how to read it (`Foreign`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evictbench import hub
from evictbench.errors import UserError
from evictbench.models.load import Source, weights_hash
from evictbench.policy.step import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.base import Policy

TENSORS, CONFIG, CARD, CURVES = "weights.safetensors", "config.json", "README.md", "curves.jsonl"

_REQUIRED = ("policy", "variant", "base_model")


@dataclass(frozen=True)
class Weights:
    """Trained tensors and their card. origin: where they come from, in words. sha256: of tensors and card together.

    transferred_from: the model that they were trained on, where that is another than the one they now serve.
    """

    tensors: Mapping[str, Tensor]
    card: Mapping[str, Any]
    origin: str
    sha256: str
    transferred_from: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What a result says of its weights."""
        transferred = {"transferred_from": self.transferred_from} if self.transferred_from else {}
        return {"sha256": self.sha256, "variant": self.card["variant"], **transferred}

    def __str__(self) -> str:
        words = f"{self.origin}, sha256 {self.sha256[:12]}"
        return f"{words}, transferred from {self.transferred_from}" if self.transferred_from else words


class Foreign(Protocol):
    """How to read weights that others have saved: an attribute `foreign` of the policy that they are for."""

    files: tuple[str, ...]
    """Names of the one file that such a folder holds, the likeliest first."""

    def read(self, file: Path, origin: str, shape: ModelShape) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """The tensors that `Policy.use` takes, and a card: at least policy, variant and base_model {name, shape}.

        shape: of the model that they are to serve. Raises UserError for what cannot be read.
        """


def find(policy: Policy, where: str | None, model: str, model_sha256: str, shape: ModelShape) -> Weights:
    """The weights for a policy on a model: those at `where` (a folder or a hub id), else those that come with it.

    model, model_sha256: the model's name in results and its `models.weights_hash`. Raises UserError where there are
    none, or they are broken, another policy's or variant's, or another model's.
    """
    if where is not None:
        return _fitting(load(where, policy, shape), policy, model, model_sha256, shape)
    variant = variant_of(policy)
    bundled = [(folder, card) for folder, card in _bundled(policy) if card["variant"] == variant]
    own = [folder for folder, card in bundled if model_sha256 in _models_of(card)]
    named = [folder for folder, card in bundled if card["base_model"]["name"] == model]
    any_model = [folder for folder, card in bundled if card.get("transferable")]
    chosen = next(iter([*own, *named, *any_model]), None)
    if chosen is None:
        suffix = f" (variant {variant})" if variant else ""
        raise UserError(
            f"{policy.name} is learned, and no weights for {model}{suffix} come with evictbench: train them "
            f"(evictbench train --policy {policy.name} --model {model} --data ... --out FOLDER), or name some with "
            "--weights."
        )
    return _fitting(_read(chosen, f"bundled {chosen.name}"), policy, model, model_sha256, shape)


def equip(policy: Policy, where: str | None, source: Source, model: str, shape: ModelShape) -> Weights | None:
    """Find a learned policy's weights and let it take them; None for a policy that has none to take.

    where: as `--weights` names them; None: those that come with the policy.
    """
    if not policy.learned:
        if where is not None:
            raise UserError(f"{policy.name} is not learned and takes no weights: leave out {where}.")
        return None
    found = find(policy, where, model, weights_hash(source), shape)
    taker: Any = policy
    taker.use(found, shape)
    return found


def load(where: str, policy: Policy | None = None, shape: ModelShape | None = None) -> Weights:
    """The weights in a folder, or at a hub id (owner/name or owner/name@revision); UserError if there are none.

    policy, shape: whose they are to be and on what model, so that a layout that this policy reads is read too.
    """
    foreign: Foreign | None = getattr(policy, "foreign", None) if shape is not None else None
    folder = Path(where).expanduser()
    if folder.is_dir():
        return _read_any(folder, where, foreign, shape)
    if folder.exists():
        raise UserError(f"The weights {where} are a file; give the folder that holds {TENSORS} and {CONFIG}.")
    if where.startswith((".", "~", "/")) or where.count("/") != 1:
        raise UserError(f"There is no folder {where} (--weights).")
    repo, _, revision = where.partition("@")
    others = foreign.files if foreign is not None else ()
    folder = hub.snapshot(repo, revision or None, known_by=(CONFIG, *others))
    if not any((folder / name).is_file() for name in (TENSORS, *others)):
        hub.fetch_weights(repo, folder, [TENSORS, *others])
    return _read_any(folder, f"{repo}@{folder.name[:12]}", foreign, shape)


def save(
    folder: Path, policy: str, variant: str, tensors: Mapping[str, Tensor], card: Mapping[str, Any], half: bool = False
) -> None:
    """Write tensors, config.json and the card in words into `folder`, each file replaced at once.

    card: `base_model` {name, sha256, shape}, `settings`, `transferable`, `training`, `calibration`, `notes`.
    half: floating tensors are kept as float16; UserError where one does not fit its range.
    """
    from safetensors.torch import save_file

    from evictbench.models.model_card import in_words
    from evictbench.store.files import write_json

    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if half:
        kept = {name: _halved(name, tensor) for name, tensor in kept.items()}
    folder.mkdir(parents=True, exist_ok=True)
    data = {"policy": policy, "variant": variant, **card}
    unfinished = folder / f".{TENSORS}-unfinished"
    save_file(kept, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / TENSORS)
    write_json(folder / CONFIG, data)
    unfinished = folder / f".{CARD}-unfinished"
    unfinished.write_text(in_words(data, kept), encoding="utf-8")
    unfinished.replace(folder / CARD)


def shape_data(shape: ModelShape) -> dict[str, int]:
    """A model's shape as plain data, for a card; without what is not stated."""
    return {name: size for name, size in dataclasses.asdict(shape).items() if size}


def variant_of(policy: Policy) -> str:
    """Which of a policy's trained weights it wants ("mean"); "" where there is one kind."""
    return str(getattr(policy, "variant", ""))


def _bundled(policy: Policy) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of a policy's weights in the package of its class, and their cards."""
    package = getattr(sys.modules[type(policy).__module__], "__package__", None)
    if not package:  # a policy from a file
        return []
    root = resources.files(package) / "weights"
    if not isinstance(root, Path) or not root.is_dir():
        return []
    folders = sorted(folder for folder in root.iterdir() if (folder / CONFIG).is_file())
    cards = ((folder, _card(folder)) for folder in folders)
    return [(folder, card) for folder, card in cards if card["policy"] == policy.name]


def _models_of(card: Mapping[str, Any]) -> set[str | None]:
    """Hashes of the models that weights are at home on: the one that they were trained beside, before and after."""
    return {card["base_model"].get("sha256"), card.get("finetuned", {}).get("sha256")}


def _read(folder: Path, origin: str) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    card = _card(folder)
    file = folder / TENSORS
    if not file.is_file():
        raise UserError(f"The weights {origin} lack {TENSORS}.")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The weights {origin} cannot be read: {TENSORS} is damaged or cut short.") from error
    whole = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        with (folder / name).open("rb") as stream:
            whole.update(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return Weights(tensors, card, origin, whole.hexdigest())


def _read_any(folder: Path, origin: str, foreign: Foreign | None, shape: ModelShape | None) -> Weights:
    """A folder of ours, or of a layout that the policy reads."""
    if foreign is None or shape is None or (folder / TENSORS).is_file():
        return _read(folder, origin)
    file = next((folder / name for name in foreign.files if (folder / name).is_file()), None)
    if file is None:
        return _read(folder, origin)
    tensors, card = foreign.read(file, origin, shape)
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return Weights(tensors, card, origin, sha256)


def _card(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"The folder {folder} holds no weights of a policy: it has no {CONFIG}.")
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        shape = card["base_model"]["shape"]
        whole = all(name in card for name in _REQUIRED) and ModelShape(**shape) is not None
    except (OSError, ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise UserError(f"{file} is not the card of a policy's weights: it does not say {', '.join(_REQUIRED)}.")
    assert isinstance(card, dict)
    return card


def _fitting(weights: Weights, policy: Policy, model: str, model_sha256: str, shape: ModelShape) -> Weights:
    """The weights if they fit; where they were trained on another model, they say so."""
    card = weights.card
    if card["policy"] != policy.name:
        raise UserError(f"The weights {weights.origin} are those of {card['policy']}, not of {policy.name}.")
    wanted = variant_of(policy)
    if card["variant"] != wanted:
        raise UserError(
            f"The weights {weights.origin} are {policy.name}'s variant {card['variant'] or 'without a name'!r}, and "
            f"{wanted or 'without a name'!r} is asked for."
        )
    base = card["base_model"]
    found, expected = base["shape"], shape_data(shape)
    differ = [name for name in ("layers", "kv_heads", "head_dim") if found[name] != expected[name]]
    if differ and not card.get("transferable"):
        raise UserError(
            f"The weights {weights.origin} were trained on {base['name']}, a model of another shape: "
            + " and ".join(f"{found[name]} {name}, where {model} has {expected[name]}" for name in differ)
            + "."
        )
    # Others' weights name their model and have no hash of it.
    named = base.get("sha256") is None and Path(base["name"]).name == Path(model).name
    at_home = named or model_sha256 in _models_of(card)
    return weights if at_home else dataclasses.replace(weights, transferred_from=base["name"])


def _halved(name: str, tensor: Tensor) -> Tensor:
    import torch

    if not tensor.is_floating_point():
        return tensor
    half = tensor.to(torch.float16)
    if not torch.equal(half.isfinite(), tensor.isfinite()):
        raise UserError(f"The tensor {name} does not fit float16: save it in float32.")
    return half
