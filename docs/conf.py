"""Sphinx builds the documentation site from this folder: ``make docs``, which writes to ``outputs/docs``.

The API reference imports rlcore as it is installed. It needs neither an accelerator nor the extras beside ``[docs]``.
"""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

import rlcore

DOCS = Path(__file__).parent

project = "rlcore"
author = copyright = "The rlcore authors"
version = release = rlcore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
highlight_language = "text"  # of blocks that name none
myst_heading_anchors = 3  # links name headings as on GitHub

html_theme = "furo"
html_title = f"rlcore {release}"
html_show_copyright = False
html_copy_source = False
html_extra_path = ["report.html"] if (DOCS / "report.html").exists() else []

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True


def setup(app: Sphinx) -> None:
    app.connect("source-read", leave_out_results)
    app.connect("autodoc-process-docstring", keep_colon, priority=400)  # before napoleon's
    app.connect("autodoc-process-signature", leave_out_signature)


def leave_out_results(app: Sphinx, page: str, source: list[str]) -> None:
    """Drop results.md from the contents where ``make results`` has not written it."""
    if page == "index" and not (DOCS / "results.md").exists():
        source[0] = source[0].replace("\nresults\n", "\n")


def keep_colon(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking the words before a colon in an attribute's first line for the attribute's type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = "..", ""  # an empty comment


def leave_out_signature(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show no arguments for a protocol, which nobody constructs."""
    return ("" if what == "class" and signature == "(*args, **kwargs)" else signature), returns
