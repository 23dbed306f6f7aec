"""Sphinx configuration; `make docs` builds it."""

from __future__ import annotations

from lowtide import __version__

project = "Lowtide"
author = "The Lowtide authors"
copyright = "The Lowtide authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# A pydantic model's own machinery is nothing a reader looks for here.
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}

html_theme = "furo"
html_title = f"Lowtide {__version__}"
html_copy_source = False
