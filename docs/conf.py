"""Sphinx: `make docs` builds these pages, with the reference from docstrings; a warning is an error."""

from importlib.metadata import version as _version

project = "autoshard"
author = "the autoshard developers"
release = _version("autoshard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # docstrings write `names` in single backticks
highlight_language = "none"  # blocks of output; Python is marked as such
html_theme = "furo"
html_title = f"autoshard {release}"

# Headings can be linked to; files of the repository that are no pages are downloads.
myst_heading_anchors = 3

# The reference shows names and defaults in the signature; types are in it too, not repeated below.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
