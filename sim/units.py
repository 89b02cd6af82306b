"""Sizes and rates as people write them. Inside, everything is integer bytes and integer nanoseconds."""

from __future__ import annotations

import re

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([A-Za-z]+)\s*", re.IGNORECASE)

NS_PER_S = 10**9


def parse_bytes(text: str) -> int:
    """``"24 GiB"`` or ``"9 GB"`` as bytes. Raises ValueError for anything without a number and a unit of size."""
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _BYTES:
        raise ValueError(f'{text!r} is not a size; write a number and a unit, such as "24 GiB" or "9 GB"')
    return round(float(match.group(1)) * _BYTES[unit])


def parse_rate(text: str) -> float:
    """``"12.35 GB/s"`` as bytes per second. Raises ValueError for anything else."""
    amount, slash, per = text.rpartition("/")
    if not slash or per.strip() != "s":
        raise ValueError(f'{text!r} is not a rate; write for example "12.35 GB/s"')
    try:
        return float(parse_bytes(amount))
    except ValueError as error:
        raise ValueError(f'{text!r} is not a rate; write for example "12.35 GB/s"') from error


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
