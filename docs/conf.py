"""What Sphinx is told of the site; scripts/docs builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ftmesh import __version__ as version  # found by the line above

project = "ftmesh"
copyright = "the authors of ftmesh"
release = version
extensions = ["myst_parser", "sphinx.ext.autodoc"]

default_role = "code"  # `name` in a docstring
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say what is taken, in words
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"ftmesh {version}"
html_copy_source = False
