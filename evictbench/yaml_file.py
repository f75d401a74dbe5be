"""YAML files in which no key is given twice: YAML itself would take the last one and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evictbench.errors import UserError, one_line

KeyPath = tuple[str | int, ...]

DEPTH = 6
"""Keys and indices on the way to the deepest line that `load_with_lines` knows."""


def load(path: Path) -> Any:
    """The content of a YAML file, read with the safe loader.

    Raises UserError naming the file, and the key and the line where a key is given twice in one place.
    """

    def construct(loader: Any) -> Any:
        root = _checked(path, loader)
        return None if root is None else loader.construct_document(root)

    return _read(path, construct)


def load_with_lines(path: Path) -> tuple[Any, dict[KeyPath, int]]:
    """`load`, and the line of each key and list item, by the keys and indices that lead to it, `DEPTH` of them at most.

    What an alias stands for has the lines of its anchor.
    """

    def construct(loader: Any) -> tuple[Any, dict[KeyPath, int]]:
        root = _checked(path, loader)
        lines: dict[KeyPath, int] = {}
        if root is None:
            return None, lines
        _add_lines(root, (), lines)
        return loader.construct_document(root), lines

    found: tuple[Any, dict[KeyPath, int]] = _read(path, construct)
    return found


def check_keys(path: Path) -> dict[str, str]:
    """Raise UserError where `load` would, for a file that another library reads, tags of its own included.

    Returns the outermost keys whose values are plain words, as they are written.
    """
    import yaml

    def plain(loader: Any) -> dict[str, str]:
        root = _checked(path, loader)
        pairs = root.value if isinstance(root, yaml.MappingNode) else ()
        return {key.value: value.value for key, value in pairs if isinstance(value, yaml.ScalarNode)}

    words: dict[str, str] = _read(path, plain)
    return words


def _read(path: Path, use: Callable[[Any], Any]) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            return use(loader)
        finally:
            loader.dispose()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is not YAML that can be read: {one_line(error).rstrip('.')}.") from error


def _add_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    import yaml

    if len(path) == DEPTH:
        return
    items: list[tuple[str | int, int, Any]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(str(key.value), key.start_mark.line, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, value.start_mark.line, value) for index, value in enumerate(node.value)]
    for key, line, value in items:
        lines[(*path, key)] = line + 1
        _add_lines(value, (*path, key), lines)


def _checked(path: Path, loader: Any) -> Any:
    """The document as a tree of nodes, after a look at every mapping in it."""
    import yaml

    root = loader.get_single_node()
    seen = set()
    left = [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                left += [key, value]
                name, line = (key.tag, str(key.value)), key.start_mark.line + 1
                if name in lines:
                    first = lines[name]
                    raise UserError(f"{path}, line {line}: the key {key.value} is given twice (first in line {first}).")
                if isinstance(key, yaml.ScalarNode):
                    lines[name] = line
        elif isinstance(node, yaml.SequenceNode):
            left += node.value
    return root
