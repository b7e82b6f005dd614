"""Read YAML as strictly as JSON: no duplicate keys, no NaN, checked against a schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from schemas import documents
from schemas.errors import UsageError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader if PyYAML has it: ten times as fast."""


class _UniqueKeys(LOADER):  # type: ignore[misc,valid-type]
    """A loader that rejects duplicate keys (SafeLoader silently takes the last one) and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", node.start_mark)
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", node.start_mark)
        return dict(super().construct_mapping(node, deep))


# Dates stay text, as in JSON, so 2026-12-31 needs no quotes.
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in _UniqueKeys.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, schema: str) -> Any:
    """Return the YAML document at `path`, checked against schemas/`schema`.schema.json.

    Raises:
        UsageError: the file is unreadable, not YAML, ambiguous (a key occurs twice) or invalid. The message names the file, and
            the position of the error if the file can be read.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error  # `rackproof` adds a remedy that depends on `error`
    # PyYAML raises one of these also if a value does not match its tag (`!!bool x`, `!!int ""`), or the text is not UTF-8.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    try:
        documents.refuse_unbounded(document, source=str(path))
        documents.validate(document, schema, source=str(path))
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    return document
