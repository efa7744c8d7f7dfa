"""Packages that a plain install leaves out, and names that are imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ftmesh.errors import MissingExtraError

# Packages by the extra of pyproject.toml that installs them.
EXTRAS = {
    "optim": ("optax",),
    "nn": ("flax",),
    "examples": ("google", "google_crc32c", "grain", "orbax", "PIL", "rich", "tokenizers"),
    "plots": ("matplotlib",),
    "test": ("libtpu",),
}


def require(module: str, extra: str, *packages: str) -> None:
    """Raise MissingExtraError if one of `packages`, which `module` imports, is not installed."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise _missing_extra(module, extra, missing)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """Return the error that names the extra of a package that was not found, if there is one."""
    package = (error.name or "").split(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return _missing_extra("this command", extra, [package])
    return None


def lazy_attributes(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that imports names from their `sources` when used."""

    def get(name: str) -> Any:
        if name in sources:
            return getattr(import_module(sources[name]), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def _missing_extra(module: str, extra: str, packages: list[str]) -> MissingExtraError:
    return MissingExtraError(
        f"{module} needs {' and '.join(packages)}, which {'is' if len(packages) == 1 else 'are'} "
        f"not installed: pip install 'ftmesh[{extra}]'"
    )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
