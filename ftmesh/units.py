"""Parses and formats sizes (``100MB``), rates (``50GB/s``) and times (``0.5us``)."""

from __future__ import annotations

import operator
import re
from typing import Any

from ftmesh.errors import ArgumentError

_AMOUNT = r"([0-9]+(?:\.[0-9]+)?)\s*"
_PREFIXES = " kmgtp"
_BYTES = re.compile(rf"{_AMOUNT}([{_PREFIXES.strip()}])?(i)?b?", re.IGNORECASE)
_TIME = re.compile(rf"{_AMOUNT}(ns|us|µs|ms|s|min|h|d|w)")
_SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0,
    "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
}  # fmt: skip
MAX_PAYLOAD_BYTES = 2**53  # 9 PB
_MAX_SECONDS = 1e11  # three thousand years


def check_bytes(
    amount: Any, *, name: str = "payload_bytes", maximum: int | None = MAX_PAYLOAD_BYTES
) -> int:
    """Return `amount` as an int, or raise ArgumentError unless it is from 1 to `maximum`."""
    try:
        number = 0 if isinstance(amount, bool) else operator.index(amount)
    except TypeError:
        number = 0
    if maximum is not None and abs(number) > maximum:
        raise ArgumentError(f"{name} must be a positive whole number up to {maximum:,}")
    if number < 1:
        raise ArgumentError(f"{name} must be a positive whole number, not {amount!r}")
    return number


def parse_bytes(text: str) -> int:
    """Return ``"100MB"`` as bytes. Units are decimal (kB to PB) or binary (KiB to PiB)."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise ArgumentError(f"{text!r:.40} is not a size: write a number and a unit, as in '100MB'")
    if re.search(rf"[{_PREFIXES.strip().upper()}]i?b$", text.strip()):
        raise ArgumentError(f"{text!r} reads as bits: write bytes with a capital B, as in '100MB'")
    scale = 1024 if match[3] else 1000
    power = _PREFIXES.index((match[2] or " ").lower())
    amount = float(match[1]) * scale**power
    if amount > MAX_PAYLOAD_BYTES:
        raise ArgumentError(f"a size is {MAX_PAYLOAD_BYTES:,} bytes at most, not {text[:20]!r}")
    return int(amount)


def parse_rate(text: str) -> float:
    """Return ``"50GB/s"`` as bytes per second."""
    size, slash, per = text.strip().partition("/")
    if not slash or per != "s" or not _BYTES.fullmatch(size):
        raise ArgumentError(f"{text!r:.40} is not a rate: write bytes per second, as in '50GB/s'")
    if size.endswith("b"):
        rule = "write bytes with a capital B, as in '50GB/s' (8 bits are a byte)"
        raise ArgumentError(f"{text!r} reads as bits per second: {rule}")
    return float(parse_bytes(size))


def parse_time(text: str) -> float:
    """Return ``"0.5us"`` as seconds. Units are ns, us, ms, s, min, h, d and w."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        rule = "write a number and a unit, as in '0.5us', '50ms' or '8h'"
        raise ArgumentError(f"{text!r:.40} is not a time: {rule}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _MAX_SECONDS:
        limit = format_time(_MAX_SECONDS)
        raise ArgumentError(f"{text!r:.40} is more than {limit}, the longest time allowed")
    return seconds


def format_bytes(amount: float) -> str:
    """Return bytes as text in a fitting decimal unit.

    >>> format_bytes(48_437_500)
    '48.4 MB'
    """
    digits = {"B": 3, "kB": 3, "MB": 3, "GB": 4, "TB": 4}
    for unit, precision in digits.items():
        if amount < 10**precision - 0.5:
            return f"{amount:.{precision}g} {unit}"
        amount /= 1000
    return f"{amount:.4g} PB"


def format_rate(bytes_per_second: float) -> str:
    """Return bytes per second as text in a fitting decimal unit."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_time(seconds: float) -> str:
    """Return seconds as text in a fitting unit.

    >>> format_time(0.00152), format_time(5e-7), format_time(40_000)
    ('1.52 ms', '0.5 us', '11.1 h')
    """
    names = ("d", "h", "min") if seconds >= 99.5 else ("s", "ms", "us")
    unit = next((name for name in names if seconds >= 0.9995 * _SECONDS[name]), "us")
    amount = seconds / _SECONDS[unit]
    return f"{amount:.0f} {unit}" if amount >= 999.5 else f"{amount:.3g} {unit}"


def check_number(value: Any, name: str, least: float, most: float) -> float:
    """Return `value` as a float; raise ArgumentError unless it is a number in that range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # NaN is in no range
        raise ArgumentError(
            f"{name} must be a number from {least:g} to {most:g}, not {value!r:.40}"
        )
    return float(value)
