"""The options of `evictbench train`, and the checks that need no model: names, numbers, choices, folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.errors import UserError, unknown
from evictbench.evaluation.settings import CHOICES
from evictbench.models import bundled
from evictbench.numerals import check_count, check_seed, read_whole, shown
from evictbench.policy.base import BasePolicy, NoSettings
from evictbench.store.files import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORD = "train.json"
"""The file that says which training a folder holds."""

BLOCKS, STORE = "blocks", "store"
"""Folders of blocks and features. They may be there before the record is: from a training that was stopped early, or
from another process of this one."""

WEIGHTS_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class TrainSettings:
    """The options of `evictbench train`, as given.

    batch_size: blocks in one forward pass of one process; accumulate: forward passes to a step. blocks: how many are
    made of the data at most; None: as many as the steps can use. held_out: None is the learner's own number. store:
    the folder of features; None: one in `out`.
    """

    policy: str
    data: tuple[str, ...]
    out: Path
    model: str = bundled.NAME
    steps: int = 1000
    budget: str = "256"
    window: int = 32
    recipe: str | None = None
    finetune: bool = False
    lr: float = 1e-3
    model_lr: float = 8e-5
    length: int = 2048
    no_pack: bool = False
    blocks: int | None = None
    held_out: int | None = None
    batch_size: int = 1
    accumulate: int = 1
    seed: int = 0
    save_every: int = 100
    weights_dtype: str = "float32"
    store: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Checked:
    """What the names and numbers of a training stand for."""

    chosen: registry.ChosenPolicy
    policy: BasePolicy
    recipe: Any
    budgets: tuple[int, ...]


def check(settings: TrainSettings) -> Checked:
    """Look up every name and check every number, choice and path; raises UserError for the first that is wrong."""
    chosen = registry.parse_policy(settings.policy)
    policy = chosen.policy(chosen.config)
    if not hasattr(policy, "learner"):
        raise UserError(f"{chosen.name} has nothing to train: `evictbench list policies` says which are learned.")
    recipe = registry.read_settings(
        getattr(policy, "Recipe", NoSettings), settings.recipe or "", f"{chosen.name}'s recipe", "--recipe "
    )
    budgets = _budgets(settings)
    _check_numbers(settings)
    _check_data(settings.data, text_makers(policy))
    _check_out(settings)
    return Checked(chosen, policy, recipe, budgets)


def text_makers(policy: BasePolicy) -> Mapping[str, str]:
    """The makers of the training texts that a policy brings: name to "module:function"."""
    makers: Mapping[str, str] = getattr(policy, "texts", {})
    return makers


def _budgets(settings: TrainSettings) -> tuple[int, ...]:
    budgets = []
    for text in settings.budget.split(","):
        try:
            budgets.append(read_whole(text))
        except ValueError:
            raise UserError(
                f"--budget takes numbers of entries (256, or 256,512), and not {shown(text.strip())!r}."
            ) from None
    least = min(budgets)
    if least <= settings.window:
        raise UserError(f"A budget of {least} entries leaves none to choose beside a window of {settings.window}.")
    return tuple(budgets)


def _check_numbers(settings: TrainSettings) -> None:
    for name in ("steps", "length", "batch_size", "accumulate", "save_every", "blocks"):
        check_count(name.replace("_", "-"), getattr(settings, name))
    for name in ("window", "held_out"):
        check_count(name.replace("_", "-"), getattr(settings, name), least=0)
    check_seed(settings.seed)
    for name in ("lr", "model_lr"):
        value = getattr(settings, name)
        if not 0 < value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value:g}; it has to be above 0 and below 1.")
    for name, choices in (("dtype", CHOICES["dtype"]), ("weights_dtype", WEIGHTS_DTYPES)):
        if getattr(settings, name) not in choices:
            raise unknown("value", getattr(settings, name), choices, f" of --{name.replace('_', '-')}")
    if settings.no_pack and settings.batch_size > 1:
        raise UserError(
            "Texts left as they are (--no-pack) go one at a time: --batch-size 1; --accumulate adds them up."
        )


def _check_data(names: tuple[str, ...], makers: Mapping[str, str]) -> None:
    if not names:
        raise UserError("There is nothing to train on: name files, folders or a hub dataset with --data.")
    for name in names:
        path = Path(name).expanduser()
        if name in makers or path.exists():
            continue
        if name.startswith((".", "~", "/")) or name.count("/") != 1 or path.suffix in (".jsonl", ".json", ".txt"):
            known = f" and not one of {', '.join(makers)}" if makers else ""
            raise UserError(
                f"There is no file or folder {name} (--data){known}, and it is no hub dataset (owner/name)."
            )


def _check_out(settings: TrainSettings) -> None:
    out = settings.out
    check_writable(out, "A training", "a training needs")
    if settings.store is not None:
        check_writable(settings.store, "Features", "features need")
    if out.is_dir():
        foreign = sorted(
            path.name for path in out.iterdir() if path.name[0] != "." and path.name not in (BLOCKS, STORE)
        )
        if foreign and not (out / RECORD).is_file():
            raise UserError(f"{out} is not a folder of an evictbench training (it holds {foreign[0]}): name another.")
