"""``python -m ftmesh``."""

import sys

from ftmesh.cli import main

sys.exit(main())
