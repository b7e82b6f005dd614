"""Read YAML strictly: refuse duplicate keys, NaN, and documents that do not match their schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from schemas import documents
from schemas.errors import UsageError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader if PyYAML was built with it; otherwise the Python loader, which takes ten times as long."""


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


# A date such as 2026-12-31 is read as text, so it needs no quotes.
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in _UniqueKeys.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path, schema: str) -> Any:
    """Return the YAML document at `path`, checked against schemas/`schema`.schema.json.

    Raises:
        UsageError: the file cannot be read, is not YAML, has a duplicate key, or does not match the schema.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        # `from error`, because `rackproof.main` then adds a remedy to the message.
        raise UsageError(f"{path}: {error.strerror}") from error
    # Some of these are raised if a value does not match its tag (`!!bool x`, `!!int ""`), or if the file is not UTF-8.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    try:
        documents.refuse_unbounded(document, source=str(path))
        documents.validate(document, schema, source=str(path))
    except documents.DocumentError as error:
        raise UsageError(str(error)) from None
    return document
