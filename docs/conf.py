"""Configuration of the site of the docs; scripts/docs builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ftmesh import __version__ as version  # on the path set above

project = "ftmesh"
copyright = "the authors of ftmesh"
release = version
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

default_role = "code"  # `name` in a docstring
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they are long, and docstrings say what matters
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"ftmesh {version}"
html_copy_source = False
