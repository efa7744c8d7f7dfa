"""Parsing and formatting sizes, rates and times."""

import pytest

from ftmesh.errors import ArgumentError
from ftmesh.units import (
    MAX_PAYLOAD_BYTES,
    format_bytes,
    format_rate,
    format_time,
    parse_bytes,
    parse_rate,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100MB", 10**8),
        ("64KiB", 65536),
        ("1.5 GB", 1_500_000_000),
        ("12", 12),
        ("3b", 3),
        ("2TB", 2 * 10**12),
        ("9PB", 9 * 10**15),
        ("1.5 TiB", 3 * 2**39),
        ("1pib", 2**50),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


def test_bad_sizes():
    with pytest.raises(ArgumentError, match="'1zb' is not a size"):
        parse_bytes("1zb")
    for large in ("9" * 400, "9223372036854775808GB"):
        with pytest.raises(ArgumentError, match="bytes at most, not '9"):
            parse_bytes(large)


def test_sizes_are_formatted_in_a_fitting_unit():
    assert format_bytes(999_700) == "1 MB"
    assert [format_bytes(n) for n in (12, 4096, 48_437_500, 1_344_904_432)] == [
        "12 B", "4.1 kB", "48.4 MB", "1.345 GB",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "rate"), [("50GB/s", 5e10), ("1.5 MB/s", 1.5e6), ("7B/s", 7.0)])
def test_rates(text, rate):
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["50GB", "fast", "50GB/h", "/s", ""])
def test_bad_rates(text):
    with pytest.raises(ArgumentError, match="is not a rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.5us", 5e-7), ("20 ns", 2e-8), ("50ms", 0.05), ("8h", 28800.0), ("3 d", 259200.0)],
)
def test_times(text, seconds):
    assert parse_time(text) == pytest.approx(seconds, rel=1e-15)
    assert parse_time(format_time(seconds)) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["0.5", "us", "-1us", "1 fortnight"])
def test_bad_times(text):
    with pytest.raises(ArgumentError, match="is not a time"):
        parse_time(text)


def test_times_are_formatted_in_a_fitting_unit():
    amounts = (0.0, 4e-7, 0.0015, 59.0, 120.0, 7200.0, 864000.0)
    assert [format_time(seconds) for seconds in amounts] == [
        "0 us", "0.4 us", "1.5 ms", "59 s", "2 min", "2 h", "10 d",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["50Gb/s", "50gb/s", "7b/s", "2Tb/s", "1.5 Mb/s", "1Gib/s"])
def test_bits_are_not_bytes(text):
    with pytest.raises(ArgumentError, match="reads as bits per second: write bytes"):
        parse_rate(text)
    assert parse_rate(text.replace("b", "B").replace("g", "G")) > 0


def test_amounts_have_bounds():
    for parse, text in ((parse_bytes, "9" * 5000), (parse_time, "9" * 5000 + "d")):
        with pytest.raises(ArgumentError, match=r"at most|is more than") as caught:
            parse(text)
        assert len(str(caught.value)) < 120
    with pytest.raises(ArgumentError, match="'100Mb' reads as bits"):
        parse_bytes("100Mb")
    assert [format_bytes(10.0**n) for n in (12, 13, 15)] == ["1000 GB", "10 TB", "1000 TB"]
    assert format_bytes(MAX_PAYLOAD_BYTES) == "9007 TB"
    assert format_bytes(2e16) == "20 PB"


@pytest.mark.parametrize("text", ["٣", "٣GB", "1.٣MB"])
def test_only_ascii_digits_are_accepted(text):
    for parse, written in (
        (parse_bytes, text),
        (parse_rate, f"{text}/s"),
        (parse_time, f"{text}s"),
    ):
        with pytest.raises(ArgumentError, match="is not a"):
            parse(written)
