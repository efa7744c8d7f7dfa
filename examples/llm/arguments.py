"""The arguments of programs that make the model: a preset, and fields to change."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp

from examples.llm.config import PRESETS, Config
from examples.llm.sharding import EVERY_CHIP
from ftmesh.errors import ArgumentError

DTYPES = ("dtype", "logits")  # fields that name one


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change what is compiled."""
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="tiny", help="default: %(default)s")
    add_settings(parser)
    text = (
        f"chips that share a copy of the weights, as 2x2; {EVERY_CHIP}: all (default: %(default)s)"
    )
    add("--replica", default="1x1", metavar="TILE", help=text)
    add("--failed", metavar="BLOCKS", help="failed chips, as 2x2@2,2 (default: FTMESH_FAILED)")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the argument that changes fields of a preset."""
    names = ", ".join(field.name for field in fields(Config))
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"one of {names}"
    )


def config_from(preset: Config, args: argparse.Namespace) -> Config:
    """Return a preset with the fields that the arguments change."""
    return changed(preset, args.set)


def changed(preset: Config, settings: Iterable[str]) -> Config:
    """Return a preset with fields changed, each as in ``"name=value"``."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in {field.name for field in fields(preset)}:
            raise ArgumentError(f"{setting!r} sets no field: give NAME=VALUE, and see --help")
        try:
            values[name] = _parse(text, type(getattr(preset, name)), is_dtype=name in DTYPES)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{setting}: {error}") from error
    return replace(preset, **values)


def _parse(text: str, kind: Any, *, is_dtype: bool) -> Any:
    if is_dtype:
        return jnp.dtype(text)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("give true or false")
        return text.lower() == "true"
    return kind(text)
