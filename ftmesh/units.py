"""The written forms of amounts: sizes (``100MB``), rates (``50GB/s``) and times (``0.5us``)."""

from __future__ import annotations

import re

from ftmesh.errors import ArgumentError

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])?(i)?b?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|min|h|d|w)")
_SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0,
    "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """``"100MB"`` as a number of bytes; decimal units (kB, MB, GB) or binary (KiB, MiB, GiB)."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise ArgumentError(f"{text!r} is not a size: write a number and a unit, as in '100MB'")
    scale = 1024 if match[3] else 1000
    power = " kmg".index((match[2] or " ").lower())
    return int(float(match[1]) * scale**power)


def parse_rate(text: str) -> float:
    """``"50GB/s"`` as bytes per second."""
    size, slash, per = text.strip().partition("/")
    if not slash or per != "s" or not _BYTES.fullmatch(size):
        raise ArgumentError(f"{text!r} is not a rate: write bytes per second, as in '50GB/s'")
    return float(parse_bytes(size))


def parse_time(text: str) -> float:
    """``"0.5us"`` in seconds; units ns, us, ms, s, min, h, d and w."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise ArgumentError(
            f"{text!r} is not a time: write a number and a unit, as in '0.5us', '50ms' or '8h'"
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(amount: float) -> str:
    """Bytes in the decimal unit that suits.

    >>> format_bytes(48_437_500)
    '48.4 MB'
    """
    for unit in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} GB"


def format_rate(bytes_per_second: float) -> str:
    """Bytes per second in the decimal unit that suits."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_time(seconds: float) -> str:
    """Seconds in the unit that suits.

    >>> format_time(0.00152), format_time(5e-7), format_time(40_000)
    ('1.52 ms', '0.5 us', '11.1 h')
    """
    names = ("d", "h", "min") if seconds >= 99.5 else ("s", "ms", "us")
    unit = next((name for name in names if seconds >= 0.9995 * _SECONDS[name]), "us")
    amount = seconds / _SECONDS[unit]
    return f"{amount:.0f} {unit}" if amount >= 999.5 else f"{amount:.3g} {unit}"
