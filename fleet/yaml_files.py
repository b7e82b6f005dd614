"""YAML as strictly as JSON: no duplicate keys, no NaN, checked by a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from schemas import documents
from schemas.errors import UsageError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where PyYAML has it, which takes a tenth of the time."""


class _UniqueKeys(LOADER):  # type: ignore[misc,valid-type]
    """SafeLoader takes the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no text", node.start_mark)
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))


# A day is text, as in JSON: 2026-12-31 needs no quotes.
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in _UniqueKeys.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, schema: str) -> Any:
    """The YAML document at `path`, checked against schemas/`schema`.schema.json.

    Raises:
        UsageError: unreadable, not YAML, ambiguous or not what the schema says; the message names file and place.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error  # by which `rackproof` says what to do
    # What is not what its tag says (`!!bool x`, `!!int ""`) PyYAML tells by whatever error it runs into.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    try:
        documents.refuse_unbounded(document, source=str(path))
        documents.validate(document, schema, source=str(path))
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    return document
