"""Features of a frozen model on the disk: computed once per block of text, read back memory-mapped at every step.

There is one safetensors file per block, named by the block's tokens, in a folder named by what else the features depend
on: the model's weights and dtype and the learner's `feature_settings`. So a run goes on where it was stopped, and
another label, budget or seed over the same text finds everything there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store.files import saving, write_json
from evictbench.store.run_folder import hash_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from evictbench.policy.learner import Learner
    from evictbench.train.data import Blocks

SPARE = 0.05
"""Share of a disk's free room that a store leaves free."""


class FeatureStore:
    """The features of one learner on one model, block by block."""

    def __init__(self, root: Path, depends_on: Mapping[str, Any]) -> None:
        text = json.dumps(depends_on, sort_keys=True, default=str)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.depends_on = dict(depends_on)

    def file(self, tokens: Tensor) -> Path:
        """The file of a block's features, there or not. tokens: `[1, S]` or `[S]`."""
        return self.folder / f"{hash_ids(tokens.flatten().tolist())}-{tokens.shape[-1]}.safetensors"

    def read(self, tokens: Tensor) -> dict[str, Tensor]:
        """A block's features by name, each `[1, ...]`, memory-mapped. tokens: `[1, S]`."""
        from safetensors import safe_open

        with safe_open(self.file(tokens), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def read_batch(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        """The features of several blocks `[1, S]` of one length, as the rows of a batch."""
        import torch

        features = [self.read(tokens) for tokens in blocks]
        if len(features) == 1:
            return features[0]
        return {name: torch.cat([block[name] for block in features]) for name in features[0]}

    def missing(self, blocks: Blocks, indices: Sequence[int]) -> list[int]:
        """Those of the blocks `indices` that have no whole file yet."""
        return [index for index in indices if not _is_whole(self.file(blocks[index]))]

    def collect(
        self, blocks: Blocks, indices: Sequence[int], model: PreTrainedModel, learner: Learner
    ) -> Iterator[int]:
        """Compute and write the features of the blocks `indices`; yields how many are done.

        Raises UserError where the disk is too small.
        """
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "depends_on.json", self.depends_on)
        for done, index in enumerate(indices, start=1):
            tokens = blocks[index]
            with torch.no_grad():
                features = learner.features(model, tokens.to(model.device))
            size = self._write(tokens, {name: _as_stored(name, tensor) for name, tensor in features.items()})
            if done == 1:
                self._check_room(size * (len(indices) - 1))
            yield done

    def _write(self, tokens: Tensor, features: Mapping[str, Tensor]) -> int:
        from safetensors.torch import save_file

        file = self.file(tokens)
        unfinished = file.with_suffix(".unfinished")
        with saving(unfinished):
            save_file(dict(features), unfinished)
        unfinished.replace(file)
        return file.stat().st_size

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free * (1 - SPARE)
        if needed > free:
            raise UserError(
                f"The features take {needed / 1e9:.1f} GB more, and {self.folder} has room for {free / 1e9:.1f} GB: "
                "name another place with --store, or take fewer --blocks."
            )


def _as_stored(name: str, tensor: Tensor) -> Tensor:
    """The tensor as it is written: float32 and float64 as float16. Raises UserError for values beyond float16."""
    import torch

    if tensor.dtype in (torch.float32, torch.float64):
        half = tensor.to(torch.float16)
        if torch.isinf(half).sum() != torch.isinf(tensor).sum():
            raise UserError(f"The feature {name} has values beyond float16: its learner has to keep it in bfloat16.")
        tensor = half
    return tensor.detach().cpu().contiguous()


def _is_whole(file: Path) -> bool:
    """Whether a file is there and readable to its end."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return False
    try:
        with safe_open(file, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
