"""Extras: packages that a plain install leaves out, how to get them, and names that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ftmesh.errors import MissingExtraError

EXTRAS = {
    "train": ("flax", "google", "google_crc32c", "grain", "optax", "PIL", "rich", "tokenizers"),
    "plots": ("matplotlib",),
    "test": ("libtpu",),
}


def require(module: str, extra: str, *packages: str) -> None:
    """Refuse to load `module` where some of `packages` are missing, and say which extra has them.

    >>> require("ftmesh.draw", "plots", "json", "no_such_package")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ftmesh.errors.MissingExtraError: ftmesh.draw needs no_such_package, ...
    """
    lacking = [name for name in packages if not _is_there(name)]
    if lacking:
        raise _missing(module, extra, lacking)


def missing(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The same of what was not found when it was imported, if one of the extras has it."""
    package = (error.name or "").split(".")[0]
    has = [extra for extra, packages in EXTRAS.items() if package in packages]
    return _missing("what was asked for", has[0], [package]) if has else None


def later(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: its names that are loaded from their homes when first asked for."""

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def _missing(module: str, extra: str, names: list[str]) -> MissingExtraError:
    return MissingExtraError(
        f"{module} needs {' and '.join(names)}, which {'is' if len(names) == 1 else 'are'} "
        f"not installed: pip install 'ftmesh[{extra}]'"
    )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
