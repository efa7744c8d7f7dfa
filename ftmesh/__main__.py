"""``python -m ftmesh``."""

import sys

from ftmesh.cli.main import main

sys.exit(main())
