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
    changes = dict(setting.partition("=")[::2] for setting in settings)
    values: dict[str, Any] = {}
    for name, text in changes.items():
        if not hasattr(preset, name) or name not in {field.name for field in fields(preset)}:
            raise ArgumentError(f"--set {name}={text}: see --help for the names")
        kind = jnp.dtype if name in ("dtype", "logits") else type(getattr(preset, name))
        try:
            values[name] = text.lower() == "true" if kind is bool else kind(text)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"--set {name}={text}: {error}") from error
    return replace(preset, **values)
