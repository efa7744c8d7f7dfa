"""Extras: packages that a plain install leaves out, and how to get those that are missing."""

from __future__ import annotations

from importlib.util import find_spec

from ftmesh.errors import MissingExtraError


def require(module: str, extra: str, *packages: str) -> None:
    """Refuse to load `module` where some of `packages` are missing, and say which extra has them.

    >>> require("ftmesh.draw", "plots", "json", "no_such_package")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ftmesh.errors.MissingExtraError: ftmesh.draw needs no_such_package, ...
    """
    missing = [name for name in packages if not _is_there(name)]
    if missing:
        raise MissingExtraError(
            f"{module} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            f"not installed: pip install 'ftmesh[{extra}]'"
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
