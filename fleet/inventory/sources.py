"""Find names that Ansible reads as another number, such as the rack 010, which is 8 in YAML."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from schemas.errors import UsageError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INT_TAG = "tag:yaml.org,2002:int"
Scalar = tuple[int, str, str, int]
"""An integer in a file: line, variable, text, and the number that this text is read as."""


def check_names_in_files(sources: Iterable[str], variables: Collection[str]) -> None:
    """Raise UsageError if one of these variables has a value that is read as another number: 010 is read as 8.

    The value that Ansible returns does not show this: the racks `010` and `8` would be one rack. Files that cannot be read and
    sources that are no files are left out: Ansible reports them if they are wrong.

    Args:
        sources: as for `ansible-playbook -i`.
        variables: variables whose values are names.
    """
    for path in dict.fromkeys(path for source in sources for path in _files(Path(source))):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        in_yaml = sorted(_yaml_integers(text)) if path.suffix in ("", ".yml", ".yaml") else []
        in_ini = _ini_integers(text) if path.suffix in ("", ".ini") else ()
        for line, name, written, number in in_yaml or in_ini:
            if name in variables and written != str(number):
                quoted = f'{name}: "{written}"' if in_yaml else f"{name}='\"{written}\"'"
                raise UsageError(
                    f"{path}:{line}: {name}: {written} is read as the number {number}: write it in quotes: {quoted}"
                )


def _files(source: Path) -> list[Path]:
    """Return the files of an inventory source. If the source is a file, add those in group_vars/ and host_vars/ beside it."""
    with suppress(OSError, ValueError):  # a list of hosts may be too long for a path
        beside = [source.parent / name for name in ("group_vars", "host_vars")] if source.is_file() else []
        found = [path for directory in beside or [source] for path in directory.rglob("*")]
        return [path for path in (source, *sorted(found)) if path.is_file()]
    return []


def _yaml_integers(text: str) -> Iterator[Scalar]:
    """Yield the integers that are the value of a key. A text that is not valid YAML has none."""
    with suppress(yaml.YAMLError):
        pending, visited = list(yaml.compose_all(text, Loader=LOADER)), set()
        while pending:
            node = pending.pop()
            if id(node) in visited:  # an alias
                continue
            visited.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                pending += node.value
            elif isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    pending.append(value)
                    if value.tag == INT_TAG:
                        yield value.start_mark.line + 1, str(key.value), value.value, yaml.safe_load(value.value)


def _ini_integers(text: str) -> Iterator[Scalar]:
    """Yield the integers in an INI inventory. Ansible reads them as literals of Python."""
    for number, line in enumerate(text.splitlines(), 1):
        for name, written in re.findall(r"(?:^|\s)(\w+)\s*=\s*([0-9]\w*)(?=\s|$)", line.partition("#")[0]):
            with suppress(ValueError, SyntaxError):
                if type(literal := ast.literal_eval(written)) is int:
                    yield number, name, written, literal
