"""Safetensors files by their headers: which tensors a file holds, and whether it is whole. No tensor is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evictbench.errors import UserError

_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. dtype: as the format names it ("F32", "I8"). nbytes: its bytes. file: the file's name."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def integer(self) -> bool:
        """Whether it holds integers or truth values."""
        return self.dtype[:1] in ("I", "U") or self.dtype == "BOOL"


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is the note that Git LFS leaves in the place of a large file."""
    with file.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS


def lfs_pointer(file: Path) -> UserError:
    """The error for such a note."""
    return UserError(
        f"{file} is a Git LFS pointer, the note that stands for a file which was not downloaded: run `git lfs pull` in "
        "that folder, or fetch the model with `hf download`."
    )


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of several files together. Raises UserError for a file that is not whole, and for a tensor that lies
    in two files."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise UserError(
                    f"The tensor {name} lies both in {tensors[name].file} and in {file.name} of {file.parent}: it has "
                    "to have one place."
                )
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises UserError, naming the file, where it is not whole or not in this format."""
    size = file.stat().st_size
    if size and is_lfs_pointer(file):
        raise lfs_pointer(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise UserError(f"{file} is no safetensors file, or only the beginning of one: it has {size:,} bytes.")
        content = stream.read(length)
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in header.items():
            first, last = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            tensors[name] = StoredTensor(str(entry["dtype"]), shape, last - first, file.name)
            end = max(end, last)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is no safetensors file: its header cannot be read.") from error
    whole = 8 + length + end
    if size != whole:
        raise UserError(
            f"{file} is {'cut short' if size < whole else 'damaged'}: it has {size:,} bytes, and its header speaks of "
            f"{whole:,}. Fetch it again."
        )
    return tensors
