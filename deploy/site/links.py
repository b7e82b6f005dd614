"""A hook of mkdocs that makes links to files outside docs/ point to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^()\s#]+)(#[^()\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page, with links to files outside docs/ replaced by links to the repository."""
    docs = Path(config.docs_dir)
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        path = docs / target
        if (files.get_file_from_path(target) is not None and not path.is_dir()) or not path.exists():
            return match[0]  # a page of the site, or a missing file, which mkdocs reports
        kind = "tree" if path.is_dir() else "blob"
        name = path.resolve().relative_to(docs.parent.resolve())
        return f"]({config.repo_url}/{kind}/main/{name}{match[2] or ''})"

    return LINK.sub(replace, markdown)
