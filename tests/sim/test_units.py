"""Sizes, rates and times: what people write, and what parses back to the same value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.units import (
    exact_bytes,
    exact_ns,
    exact_rate,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_ns,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0 B", 0),
        ("24 GiB", 24 * 2**30),
        ("9 GB", 9 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("  7 kb ", 7000),
        ("2 tib", 2**41),
        ("1e3 MB", 10**9),
        ("0.1 KiB", 102),
        ("1.1 GB", 1_100_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "24", "GiB", "-1 GB", "1 GB/s", "1,5 GB", "1 Go", "nan GB", "inf GB", "1 2 GB", "٣ GB"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write .* such as \"24 GiB\""):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("12.35 GB/s", 12.35e9), ("1 GiB/s", 2.0**30), ("300MB / s", 3e8), ("0.3 B/s", 0.3)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["12 GB", "12 GB/h", "/s", "GB/s", "12/s", "-1 GB/s", "1 GB/s/s"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rate; write for example \"12.35 GB/s\""):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "time"), [("2 us", 2000), ("1.5ms", 1_500_000), ("0 s", 0), ("3 NS", 3), ("1 s", 10**9)]
)
def test_times(text: str, time: int) -> None:
    assert parse_ns(text) == time


@pytest.mark.parametrize("text", ["2", "2 m", "-2 us", "two us", "2 µs"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time; write a number and ns, us, ms or s"):
        parse_ns(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (11 * 2**30, "11 GiB"), (375 * 10**9, "375 GB"), (1_234_567, "1234567 B"), (3 * 2**19, "1.5 MiB")],
)
def test_exact_sizes_are_short(size: int, text: str) -> None:
    assert exact_bytes(size) == text


def test_exact_rates_and_times_are_short() -> None:
    assert [exact_rate(12.35e9), exact_rate(3e8), exact_rate(0.5)] == ["12.35 GB/s", "0.3 GB/s", "0.5 B/s"]
    assert [exact_ns(0), exact_ns(2000), exact_ns(1_500_000), exact_ns(123)] == ["0 s", "2 us", "1.5 ms", "123 ns"]


@given(st.integers(0, 2**63))
def test_exact_sizes_parse_back(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


@given(st.floats(0, exclude_min=True, allow_infinity=False))
def test_exact_rates_parse_back_to_the_last_bit(rate: float) -> None:
    assert parse_rate(exact_rate(rate)) == rate


@given(st.integers(0, 2**63))
def test_exact_times_parse_back(time: int) -> None:
    assert parse_ns(exact_ns(time)) == time


def test_formats_round_for_reading() -> None:
    assert [format_bytes(size) for size in (5, 2048, 3 * 2**20, 1.5 * 2**30, 2**40, -(2**20))] == [
        "5 B",
        "2.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
        "1.00 TiB",
        "-1.00 MiB",
    ]
    assert [format_rate(rate) for rate in (12.35e9, 2.5e8)] == ["12.35 GB/s", "250.0 MB/s"]
    assert [format_seconds(time) for time in (2.5, 0.0125, 3e-6)] == ["2.50 s", "12.50 ms", "3.0 µs"]
