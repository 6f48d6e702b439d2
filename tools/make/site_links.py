"""Links of the documentation site that leave docs/: a hook of mkdocs.

Usage: make docs (mkdocs.yml names this file)
Reads   every page, the files that its links name, `extra.repository` of mkdocs.yml
Gives   on_page_markdown: links to files outside docs/ become links into the repository, or plain
        text if its address is not given; on_post_page: a check that pages load nothing from
        elsewhere. Each warning fails a strict build
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.site_links")
ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"```.*?```|`[^`\n]*`|\[([^\]]*)\]\((\.\./[^)\s]*)\)", re.DOTALL)
LOADED = re.compile(
    r"<(?:link|script|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = Path(page.file.abs_src_path).parent
    repository = config.extra["repository"].rstrip("/")

    def rewrite(link: re.Match[str]) -> str:
        text, to = link.groups()
        name, hash_sign, anchor = (to or "").partition("#")
        target = (folder / name).resolve()
        if not to or target.is_relative_to(config.docs_dir):  # quoted code, or another page
            return link[0]
        if not (target.exists() and target.is_relative_to(ROOT)):
            LOG.warning(f"{page.file.src_uri} links to {to}, which does not exist: correct it")
        elif repository:
            kind = "tree" if target.is_dir() else "blob"
            path = target.relative_to(ROOT).as_posix()
            return f"[{text}]({repository}/{kind}/main/{path}{hash_sign}{anchor})"
        return str(text)

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Any, config: Any) -> None:
    for address in LOADED.findall(output):
        LOG.warning(f"{page.file.src_uri} loads {address}: put the file into docs/ instead")
