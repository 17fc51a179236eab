"""The page at `/`: its HTML, styles and scripts as one document, which loads nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[2] / "assets" / "page"
STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">\n')
SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>\n')
INDENT_OR_COMMENT = re.compile(r"^\s*(?://.*\n)?", re.MULTILINE)
"""What a line of a script or a style begins with that need not be sent. No string there has several lines."""


class Page(NamedTuple):
    html: bytes
    gzipped: bytes
    """The same, as browsers take it: a third of the size."""
    policy: str
    """Its content security policy: its own style and script, this server's data, and nothing else."""


def read_page(folder: Path = FOLDER) -> Page:
    """Join `page.html` with the style and the scripts that it names."""
    html = (folder / "page.html").read_text("utf-8")
    [style], scripts = STYLE.findall(html), SCRIPT.findall(html)
    css, js = _joined(folder, [style]), _joined(folder, scripts)
    head, tail = STYLE.sub("", html).split("</head>")
    body, end = SCRIPT.sub("", tail).rsplit("</body>")
    html = f"{head}<style>{css}</style></head>{body}<script>{js}</script></body>{end}"
    policy = (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(js)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), gzip.compress(html.encode(), mtime=0), policy)


def page_response(page: Page, request: Request) -> Response:
    headers = {
        "content-security-policy": page.policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "vary": "accept, accept-encoding",
        "x-content-type-options": "nosniff",
    }
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(page.html, headers=headers, media_type="text/html")
    return Response(page.gzipped, headers=headers | {"content-encoding": "gzip"}, media_type="text/html")


def _joined(folder: Path, names: list[str]) -> str:
    return "".join(INDENT_OR_COMMENT.sub("", (folder / name).read_text("utf-8")) for name in names)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
