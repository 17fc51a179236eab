"""The pages that people read, and what is in them: headings, links, blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
    + [ROOT / "radixrt/worker/cuda/README.md", *(ROOT / "docs").glob("*.md")]
)
FENCE = re.compile(r"^```+(\S*)\n(.*?)^```+$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's code blocks of a language, in order."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """The commands in the shell blocks of a page, continued lines joined."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines if line.strip()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCE.sub("", page.read_text())
    headings = [line.lstrip("# ") for line in text.splitlines() if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """(target, anchor or "") of each link to something of this repository."""
    found = [link.partition("#") for link in LINK.findall(FENCE.sub("", page.read_text()))]
    return [((page.parent / path if path else page), anchor) for path, _, anchor in found]
