"""Sphinx: the documentation site, built and read without network."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "fedsim"
author = "The fedsim developers"
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nitpicky = False

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": False}
default_role = "code"  # docstrings write code in single backticks
napoleon_use_ivar = True

html_theme = "furo"  # system fonts, nothing from the network
html_title = f"fedsim {release}"
html_copy_source = False
html_show_copyright = False
