"""What authors' code did, as numbers in a file: which code it was, what was kept, scores and logits."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evictbench.errors import UserError

DATA = Path(__file__).parents[2] / "tests/authors/data"

DIGITS = 10
"""Significant digits of a number in a file."""


def checkout(description: str, files: Iterable[str]) -> Path:
    """The folder that --checkout names, put first where Python imports from. The process ends if a file is missing."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the repository at the commit")
    folder: Path = parser.parse_args().checkout.resolve()
    if missing := [name for name in files if not (folder / name).is_file()]:
        print(f"error: {folder} has no {missing[0]}.", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(folder))
    return folder


def header(
    repository: str, commit: str, licence: str, module: str, folder: Path, files: Iterable[str]
) -> dict[str, Any]:
    """What a file of numbers begins with. files: those of the repository that were run, with git's hash of each."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "repository": f"https://github.com/{repository}",
        "commit": commit,
        "licence": licence,
        "command": f"python -m {module} --checkout PATH",
        "versions": {"python": platform.python_version(), **versions},
        "files": {name: blob(folder / name) for name in files},
    }


def blob(path: Path) -> str:
    """Git's hash of a file's contents."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def write(path: Path, header: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Write a file, a line for each case. path: under `DATA`."""
    lines = [json.dumps(rounded(case), separators=(",", ":")) for case in cases]
    head = json.dumps({"header": header}, indent=1)[1:-2].strip()
    (DATA / path).parent.mkdir(parents=True, exist_ok=True)
    (DATA / path).write_text(f'{{{head},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    print(f"{DATA / path}: {(DATA / path).stat().st_size:,} bytes", file=sys.stderr)


def rounded(value: Any) -> Any:
    """The value with its numbers rounded; tensors become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return value


class Positions:
    """Tells the positions of cached entries by their values, which no cache changes.

    It listens to each layer's `v_proj`: the n-th value that a head makes is that of position n. value_heads: how many
    heads a layer's values have.
    """

    def __init__(self, model: Any, value_heads: int) -> None:
        self.value_heads = value_heads
        self.layers: list[list[dict[bytes, int]]] = []
        self.handles = []
        for layer in model.model.layers:
            seen: list[dict[bytes, int]] = [{} for _ in range(value_heads)]
            self.layers.append(seen)
            self.handles.append(layer.self_attn.v_proj.register_forward_hook(self._listen(seen)))

    def _listen(self, seen: list[dict[bytes, int]]) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            values = output[0].detach().view(output.shape[1], self.value_heads, -1)
            for head in range(self.value_heads):
                known = seen[head]
                before = len(known)
                known.update({value.numpy().tobytes(): before + index for index, value in enumerate(values[:, head])})
                assert len(known) == before + len(values)

        return hook

    def of(self, values: Sequence[Any]) -> list[list[list[int]]]:
        """Of each layer and head the positions held, ascending. values: of each layer `[1, heads, entries, head_dim]`;
        where there are more heads than a layer's values have, neighbours share one."""
        found = []
        for seen, cached in zip(self.layers, values, strict=True):
            repeats = cached.shape[1] // self.value_heads
            heads = [
                sorted(seen[head // repeats][value.detach().contiguous().numpy().tobytes()] for value in entries)
                for head, entries in enumerate(cached[0])
            ]
            found.append(heads)
        return found

    def end(self) -> None:
        """Stop listening."""
        for handle in self.handles:
            handle.remove()


class Watched:
    """Passes everything on to an object, and notes what some of its functions were given or gave.

    It stands in for a module in the authors' file, such as `torch`. noted: calls in order, by function: arguments,
    keywords, result.
    """

    def __init__(self, target: Any, functions: Iterable[str]) -> None:
        self.target = target
        self.noted: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Any]]] = {name: [] for name in functions}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        if name not in self.noted:
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = found(*arguments, **keywords)
            self.noted[name].append((arguments, keywords, result))
            return result

        return call


def read(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the cases of a file under `DATA`. Raises UserError where it cannot be read."""
    try:
        content = json.loads((DATA / path).read_text(encoding="utf-8"))
        return content["header"], content["cases"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{DATA / path} is no file of numbers: {error}.") from error
