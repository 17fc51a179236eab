"""Sphinx, for `make docs`. The source is the whole repository, so that links are the same here as at a forge."""

project = "radixrt"
author = "The radixrt authors"
project_copyright = author
extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    "docs/*.md",
    "*.md",
    "bench/README.md",
    "radixrt/assets/nano/README.md",
    "radixrt/worker/cuda/README.md",
]
exclude_patterns = [".*", "build"]
html_theme = "furo"
html_title = "radixrt"
myst_heading_anchors = 4
# Links to folders of the source have no page. tests/test_docs.py checks that every link leads somewhere.
suppress_warnings = ["myst.xref_missing"]
