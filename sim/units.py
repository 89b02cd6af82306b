"""Sizes, rates and times as people write them. Inside, everything is integer bytes and integer nanoseconds.

``parse_…`` reads a number with its unit, ``exact_…`` writes one that parses back to the very same value, and
``format_…`` rounds for reading.
"""

from __future__ import annotations

import re
from decimal import Decimal

NS_PER_S = 10**9

_DECIMAL_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = {**_DECIMAL_BYTES, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": NS_PER_S}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,2})?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """``"24 GiB"`` or ``"9 GB"`` as bytes. Raises ValueError for anything without a number and a unit of size."""
    amount = _parse(text, _BYTES)
    if amount is None:
        raise ValueError(f'{text!r} is not a size; write a number and a unit, such as "24 GiB" or "9 GB"')
    return round(amount)


def parse_rate(text: str) -> float:
    """``"12.35 GB/s"`` as bytes per second. Raises ValueError for anything else."""
    size, slash, per = text.rpartition("/")
    amount = _parse(size, _BYTES) if slash and per.strip() == "s" else None
    if amount is None:
        raise ValueError(f'{text!r} is not a rate; write for example "12.35 GB/s"')
    return float(amount)


def parse_ns(text: str) -> int:
    """``"2 us"`` or ``"1.5 ms"`` as nanoseconds. Raises ValueError for anything without a number and a unit of time."""
    amount = _parse(text, _NANOSECONDS)
    if amount is None:
        raise ValueError(f'{text!r} is not a time; write a number and ns, us, ms or s, such as "2 us"')
    return round(amount)


def exact_bytes(size: int) -> str:
    """The shortest text that :func:`parse_bytes` reads as ``size``: ``11 GiB``, ``375 GB``, ``1234567 B``."""
    return _shortest(Decimal(size), _BYTES)


def exact_rate(bytes_per_s: float) -> str:
    """The shortest text that :func:`parse_rate` reads as this rate, to the last bit: ``12.35 GB/s``."""
    return _shortest(Decimal(repr(float(bytes_per_s))), _DECIMAL_BYTES) + "/s"


def exact_ns(duration_ns: int) -> str:
    """The shortest text that :func:`parse_ns` reads as ``duration_ns``: ``2 us``."""
    return _shortest(Decimal(duration_ns), _NANOSECONDS)


def _parse(text: str, units: dict[str, int]) -> Decimal | None:
    """Number times unit, exactly; None if it is not that. Upper and lower case are the same."""
    match = _QUANTITY.fullmatch(text)
    scale = {name.lower(): value for name, value in units.items()}.get(match.group(2).lower()) if match else None
    return Decimal(match.group(1)) * scale if match and scale else None


def _shortest(amount: Decimal, units: dict[str, int]) -> str:
    """``amount`` in the unit that takes the fewest characters without losing any; of several, the largest."""
    texts = []
    for name, scale in reversed(units.items()):
        scaled = amount / scale
        if scaled * scale == amount:
            digits = f"{scaled:f}"
            texts.append(f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {name}")
    return min(texts, key=len)


def format_bytes(size: float) -> str:
    """Bytes in the binary unit that reads best: ``1.50 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second in GB/s (1e9) or MB/s."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
