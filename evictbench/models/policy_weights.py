"""Trained weights of a policy: what a folder of them holds, how one is found, and which ones are refused.

    weights.safetensors   the tensors
    config.json           the card's data: policy, variant, settings, base_model, transferable, training, calibration
    README.md             the card in words, written from config.json
    curves.jsonl          the log of the training

A folder is named on the command line by its path or as a hub id (`--weights`); those that come with evictbench lie in
the package of their policy, in folders under `weights/`, and are found by their cards. A policy whose authors have
released weights in a layout of their own may say how to read it (`ForeignFormat`), and so may one whose weights lie
among the tensors of a model's own checkpoint (`CheckpointFormat`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evictbench import hub
from evictbench.errors import UserError
from evictbench.models import model_files
from evictbench.models.file_hashes import remembered_sha256
from evictbench.models.loaded_weights import check_finite
from evictbench.models.model_card import markdown
from evictbench.models.model_files import check_inside
from evictbench.models.safetensors_files import read_header, read_headers
from evictbench.policy.step import ModelShape
from evictbench.store.files import file_sha256, saving, write_json
from evictbench.store.records import PolicyCard, checked, read_object

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.base import BasePolicy

TENSORS, CONFIG, CARD, CURVES = "weights.safetensors", "config.json", "README.md", "curves.jsonl"


@dataclass(frozen=True)
class Weights:
    """Trained tensors and their card.

    origin: where they come from, in words. sha256: of tensors and card together. transferred_from: the model that they
    were trained on, where that is another than the one they now serve. of_model: names of the tensors in the model's
    own checkpoint that they were read from.
    """

    tensors: Mapping[str, Tensor]
    card: Mapping[str, Any]
    origin: str
    sha256: str
    transferred_from: str | None = None
    of_model: frozenset[str] = frozenset()

    @property
    def identity(self) -> dict[str, Any]:
        """The weights' part of a result's identity."""
        transferred = {"transferred_from": self.transferred_from} if self.transferred_from else {}
        return {"sha256": self.sha256, "variant": self.card["variant"], **transferred}

    def __str__(self) -> str:
        text = f"{self.origin}, sha256 {self.sha256[:12]}"
        return f"{text}, transferred from {self.transferred_from}" if self.transferred_from else text


class ForeignFormat(Protocol):
    """How to read weights that others have saved. A policy has it as its attribute `foreign`."""

    files: tuple[str, ...]
    """Names of the one file that such a folder holds, the likeliest first."""

    def read(self, file: Path, origin: str, shape: ModelShape) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """The tensors that `Policy.use` takes, and a card with at least policy, variant and base_model {name, shape}.

        origin: where the file comes from, in words. shape: of the model that the weights are to serve. Raises UserError
        for what cannot be read.
        """


class CheckpointFormat(Protocol):
    """How to read weights that lie among the tensors of a model's checkpoint, in one file or in shards. A policy has it
    as its attribute `checkpoint`."""

    def owns(self, name: str) -> bool:
        """Whether a tensor of a checkpoint is the policy's."""

    def read(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str, shape: ModelShape
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """What `ForeignFormat.read` returns. tensors: those that `owns` names. config: the object in config.json.
        Raises UserError for what cannot be read."""


def find(
    policy: BasePolicy,
    where: str | None,
    model: str,
    model_sha256: Callable[[], str],
    shape: ModelShape,
    *,
    policy_argument: str | None = None,
    model_argument: str | None = None,
) -> Weights:
    """The weights of a policy for a model: those at `where` (a folder or a hub id), else those that come with it.

    model: the model's name in results. model_sha256: returns its `load.weights_hash`; it is asked only where trained
    weights are for a model of this shape. policy_argument, model_argument: what `--policy` and `--model` take to mean
    these two, for the command that trains weights. Raises UserError where there are no weights, or they are broken,
    another policy's or variant's, or another model's.
    """
    if where is not None:
        return _fitting(load(where, policy, shape), policy, model, model_sha256, shape)
    variant = variant_of(policy)
    bundled = [(folder, card) for folder, card in _bundled(policy) if card["variant"] == variant]
    own = [folder for folder, card in bundled if _same_shape(card, shape) and model_sha256() in _models_of(card)]
    named = [folder for folder, card in bundled if card["base_model"]["name"] == model]
    any_model = [folder for folder, card in bundled if card.get("transferable")]
    chosen = next(iter([*own, *named, *any_model]), None)
    if chosen is None:
        suffix = f" (variant {variant})" if variant else ""
        raise UserError(
            f"{policy.name} is learned, and no weights for {model}{suffix} come with evictbench: train them "
            f"(evictbench train --policy {shlex.quote(policy_argument or policy.name)} --model "
            f"{shlex.quote(model_argument or model)} --data ... --out FOLDER), or name some with "
            "--weights."
        )
    return _fitting(_read(chosen, f"bundled {chosen.name}"), policy, model, model_sha256, shape)


def of_model(policy: BasePolicy, folder: Path, model: str, shape: ModelShape) -> Weights:
    """The weights that lie in the model's own checkpoint. folder: with its config.json and its safetensors files.

    Raises UserError where there are none, or they cannot be read.
    """
    form: CheckpointFormat | None = getattr(policy, "checkpoint", None)
    if form is None:
        raise UserError(f"{policy.name} reads no weights from a model's own checkpoint: name some with --weights.")
    weights = _read_checkpoint(folder, f"in {model} itself", policy, form, shape)
    return dataclasses.replace(weights, of_model=frozenset(_owned(folder, model, form)))


def load(where: str, policy: BasePolicy | None = None, shape: ModelShape | None = None) -> Weights:
    """The weights in a folder or at a hub id (owner/name or owner/name@revision).

    policy, shape: whose weights they are to be and for what model; a layout that this policy reads is then read too.
    Raises UserError where there are none, or they cannot be read.
    """
    foreign: ForeignFormat | None = getattr(policy, "foreign", None) if shape is not None else None
    form: CheckpointFormat | None = getattr(policy, "checkpoint", None) if shape is not None else None
    folder = Path(where).expanduser()
    if folder.is_dir():
        return _read_any(folder, where, policy, shape)
    if folder.exists():
        raise UserError(f"The weights {where} are a file; give the folder that holds {TENSORS} and {CONFIG}.")
    if where.startswith((".", "~", "/")) or where.count("/") != 1:
        raise UserError(f"There is no folder {where} (--weights).")
    repo, _, revision = where.partition("@")
    others = foreign.files if foreign is not None else ()
    folder = hub.snapshot(repo, revision or None, known_by=(CONFIG, *others))
    cached = form is not None and any(folder.glob("*.safetensors"))
    if not cached and not any((folder / name).is_file() for name in (TENSORS, *others)):
        hub.fetch_weights(repo, folder, [TENSORS, *others])
    if form is not None and not any((folder / name).is_file() for name in (TENSORS, *others)):
        if (folder / model_files.INDEX).is_file():
            hub.fetch_weights(repo, folder, model_files.weight_files(folder, where, whole=False))
        elif not cached:
            hub.fetch_weights(repo, folder, ["*.safetensors"])
    return _read_any(folder, f"{repo}@{folder.name[:12]}", policy, shape)


def save(
    folder: Path, policy: str, variant: str, tensors: Mapping[str, Tensor], card: Mapping[str, Any], half: bool = False
) -> None:
    """Write tensors, config.json and the card in words into `folder`, each file replaced at once.

    card: `base_model` {name, sha256, shape}, `settings`, `transferable`, `training`, `calibration`, `notes`.
    half: write floating tensors as float16. Raises UserError where one does not fit its range.
    """
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if half:
        stored = {name: _as_float16(name, tensor) for name, tensor in stored.items()}
    folder.mkdir(parents=True, exist_ok=True)
    data = {"policy": policy, "variant": variant, **card}
    unfinished = folder / f".{TENSORS}-unfinished"
    with saving(unfinished):
        save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / TENSORS)
    write_json(folder / CONFIG, data)
    unfinished = folder / f".{CARD}-unfinished"
    unfinished.write_text(markdown(data, stored), encoding="utf-8")
    unfinished.replace(folder / CARD)


def shape_data(shape: ModelShape) -> dict[str, int]:
    """A model's shape as plain data, for a card; sizes that are not stated are left out."""
    return {name: size for name, size in dataclasses.asdict(shape).items() if size}


def variant_of(policy: BasePolicy) -> str:
    """The variant of its trained weights that a policy takes ("mean"); "" where there is only one."""
    return str(getattr(policy, "variant", ""))


def _bundled(policy: BasePolicy) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of weights in the package of a policy's class, and their cards."""
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
    """Hashes of the models that weights were trained with: the base model, and what fine-tuning made of it."""
    return {card["base_model"].get("sha256"), card.get("finetuned", {}).get("sha256")}


def _same_shape(card: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether weights were trained on a model of this shape, as far as a policy can tell."""
    trained = card["base_model"]["shape"]
    return all(trained[name] == getattr(shape, name) for name in ("layers", "kv_heads", "head_dim"))


def _read(folder: Path, origin: str) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    card = _card(folder)
    file = folder / TENSORS
    if not file.is_file():
        raise UserError(f"The weights {origin} lack {TENSORS}.")
    check_inside(folder, [CONFIG, TENSORS], "the folder of weights")
    read_header(file)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The weights {origin} cannot be read: {TENSORS} is damaged or cut short.") from error
    _check_numbers(tensors, origin)
    whole = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        whole.update(f"{name} {file_sha256(folder / name)}\n".encode())
    return Weights(tensors, card, origin, whole.hexdigest())


def _read_any(folder: Path, origin: str, policy: BasePolicy | None, shape: ModelShape | None) -> Weights:
    """The weights in a folder of our layout, or of one that the policy reads."""
    if policy is None or shape is None or (folder / TENSORS).is_file():
        return _read(folder, origin)
    foreign: ForeignFormat | None = getattr(policy, "foreign", None)
    names = foreign.files if foreign is not None else ()
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if foreign is not None and file is not None:
        check_inside(folder, [file.name], "the folder of weights")
        tensors, card = foreign.read(file, origin, shape)
        _check_numbers(tensors, origin)
        return Weights(tensors, card, origin, file_sha256(file))
    form: CheckpointFormat | None = getattr(policy, "checkpoint", None)
    if form is not None and any(folder.glob("*.safetensors")):
        return _read_checkpoint(folder, origin, policy, form, shape)
    return _read(folder, origin)


def _read_checkpoint(
    folder: Path, origin: str, policy: BasePolicy, form: CheckpointFormat, shape: ModelShape
) -> Weights:
    """The weights among the tensors of a model's checkpoint, or alone in one safetensors file beside a config.json.
    Their hash is that of config.json and of every file that one of them lies in."""
    from safetensors import safe_open

    owned = _owned(folder, origin, form)
    if not owned:
        raise UserError(
            f"The weights {origin} hold no tensor of {policy.name}: they are those of a model, trained without it or "
            "with no tensors beside the model's."
        )
    tensors: dict[str, Tensor] = {}
    files = sorted(set(owned.values()))
    for file in files:
        with safe_open(folder / file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in owned if owned[name] == file}
    _check_numbers(tensors, origin)
    read, card = form.read(tensors, model_files.read_object(folder / CONFIG), origin, shape)
    _check_numbers(read, origin)
    whole = hashlib.sha256()
    for name in (CONFIG, *files):
        whole.update(f"{name} {remembered_sha256(folder / name)}\n".encode())
    return Weights(read, card, origin, whole.hexdigest())


def _owned(folder: Path, origin: str, form: CheckpointFormat) -> dict[str, str]:
    """The tensors of a checkpoint that are the policy's: name to file."""
    alone = [file.name for file in folder.glob("*.safetensors")]
    if len(alone) != 1 or (folder / model_files.INDEX).is_file():
        alone = model_files.weight_files(folder, origin)
    check_inside(folder, [CONFIG, *alone], "the folder of weights")
    stored = read_headers(folder / name for name in sorted(alone))
    return {name: tensor.file for name, tensor in stored.items() if form.owns(name)}


def _check_numbers(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raise UserError for a tensor of integers, which no training makes, and for one that is not finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"The weights {origin} are not those of a training: {name} holds {dtype} numbers.")
    check_finite(tensors.items(), f"The weights {origin}")


def _card(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"The folder {folder} holds no weights of a policy: it has no {CONFIG}.")
    try:
        card = read_object(file)
        checked(card, PolicyCard)
    except (UserError, ValueError) as error:
        raise UserError(f"{file} is not the card of a policy's weights ({str(error).rstrip('.')}).") from None
    return card


def _fitting(
    weights: Weights, policy: BasePolicy, model: str, model_sha256: Callable[[], str], shape: ModelShape
) -> Weights:
    """The weights, marked with the model that they were trained on if it is another; UserError if they do not fit."""
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
    trained, wanted_shape = base["shape"], shape_data(shape)
    differ = [name for name in ("layers", "kv_heads", "head_dim") if trained[name] != wanted_shape[name]]
    if differ and not card.get("transferable"):
        raise UserError(
            f"The weights {weights.origin} were trained on {base['name']}, a model of another shape: "
            + " and ".join(f"{trained[name]} {name}, where {model} has {wanted_shape[name]}" for name in differ)
            + "."
        )
    # Others' weights name their model and have no hash of it.
    named = base.get("sha256") is None and Path(base["name"]).name == Path(model).name
    same_model = named or (_same_shape(card, shape) and model_sha256() in _models_of(card))
    return weights if same_model else dataclasses.replace(weights, transferred_from=base["name"])


def _as_float16(name: str, tensor: Tensor) -> Tensor:
    import torch

    if not tensor.is_floating_point():
        return tensor
    half = tensor.to(torch.float16)
    if not torch.equal(half.isfinite(), tensor.isfinite()):
        raise UserError(f"The tensor {name} does not fit float16: save it in float32.")
    return half
