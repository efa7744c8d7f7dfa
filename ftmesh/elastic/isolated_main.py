"""A program that runs one module of this package without importing the rest of it.

    python -I -S isolated_main.py ftmesh.elastic.peer_store

It is run by path. ``ftmesh`` becomes an empty package, so that ``main`` of the module starts at
once, with the standard library and the light modules of ftmesh.
"""

import importlib
import os
import sys
import types


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main`` of a module."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), module, *arguments]


def main() -> None:
    """Run the module that the first argument names."""
    package = types.ModuleType("ftmesh")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["ftmesh"] = package
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
