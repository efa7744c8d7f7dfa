"""A program that runs a module of this package without all else that ``import ftmesh`` brings.

    python -I -S alone.py ftmesh.elastic.peer_store

It is run by path, and the module's ``main`` starts at once: it has the standard library, and what
of the package needs no more.
"""

import importlib
import os
import sys
import types


def command(module: str, *arguments: str) -> list[str]:
    """What runs ``main`` of a module with these arguments."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), module, *arguments]


def main() -> None:
    """Run it in a package that is a mere folder."""
    package = types.ModuleType("ftmesh")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["ftmesh"] = package
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
