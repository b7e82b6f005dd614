"""Find names and versions that Ansible reads as another number: the rack 010 is 8 in YAML, and the version 1.20 is 1.2."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from schemas.errors import UsageError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
Scalar = tuple[int, str, str, int | float, str]
"""A number in a file: line, variable, text, the number that this text is read as, and how to set the variable to the text."""


def check_names_in_files(sources: Iterable[str], variables: Collection[str]) -> None:
    """Raise UsageError if one of these variables has a value that is read as another number: 010 is read as 8.

    The value that Ansible returns does not show this: the racks `010` and `8` would be one rack, and the version `550.120` would
    be `550.12`. Files that cannot be read and sources that are no files are left out: Ansible reports them if they are wrong.

    Args:
        sources: as for `ansible-playbook -i`.
        variables: variables whose values are texts, such as names and versions.
    """
    for path in dict.fromkeys(path for source in sources for path in _files(Path(source))):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        in_yaml = sorted(_yaml_numbers(text)) if path.suffix in ("", ".yml", ".yaml") else []
        in_ini = _ini_numbers(text) if path.suffix in ("", ".ini") else ()
        for line, name, written, number, quoted in in_yaml or in_ini:
            if name in variables and written != str(number):
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


def _yaml_numbers(text: str) -> Iterator[Scalar]:
    """Yield the numbers that are the value of a key. A text that is not valid YAML has none."""
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
                    if isinstance(value, yaml.ScalarNode) and value.tag in NUMBER_TAGS:
                        with suppress(ValueError):  # `!!float x`
                            name, written = str(key.value), value.value
                            yield (
                                value.start_mark.line + 1,
                                name,
                                written,
                                yaml.safe_load(written),
                                f'{name}: "{written}"',
                            )


def _ini_numbers(text: str) -> Iterator[Scalar]:
    """Yield the numbers in an INI inventory. Ansible reads every value as a literal of Python.

    In the line of a host, Ansible removes quotes before it reads a value: `x="1.20"` is the number 1.2, too.
    """
    is_of_group = False
    for number, line in enumerate(text.splitlines(), 1):
        if section := re.match(r"\s*\[(.*)\]", line):
            is_of_group = section[1].endswith(":vars")
        for name, value in _ini_variables(line.strip(), is_of_group=is_of_group):
            written = value.partition("#")[0].strip()
            with suppress(ValueError, SyntaxError):
                is_number = re.fullmatch(r"[+-]?[0-9][\w.+-]*", written)
                if is_number and type(literal := ast.literal_eval(written)) in (int, float):
                    quoted = f'"{written}"' if is_of_group else f"'\"{written}\"'"
                    yield number, name, written, literal, f"{name}={quoted}"


def _ini_variables(line: str, *, is_of_group: bool) -> Iterator[tuple[str, str]]:
    """Yield name and value of the variables in a line, split as Ansible splits it."""
    if line.startswith(("#", ";")):
        return
    if is_of_group:
        name, _, value = line.partition("=")
        yield name.strip(), value
        return
    with suppress(ValueError):  # a quote that is not closed
        for word in shlex.split(line, comments=True)[1:]:
            name, _, value = word.partition("=")
            yield name, value
