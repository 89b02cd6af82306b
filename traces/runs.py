"""Sums and maxima over runs of layers, each in constant time once it is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def prefix_sums(values: Iterable[int]) -> list[int]:
    """Sums over the first 0, 1, … items."""
    return list(accumulate(values, initial=0))


class RangeMaximum:
    """Maximum over any run of a list in constant time, by a sparse table (maxima over runs of 1, 2, 4, … items)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._levels = [list(values)]
        width = 1
        while 2 * width <= len(values):
            previous = self._levels[-1]
            self._levels.append(list(map(max, previous, previous[width:])))
            width *= 2

    def over(self, first: int, last: int) -> int:
        """Maximum of items ``first … last``."""
        level = (last - first + 1).bit_length() - 1
        row = self._levels[level]
        return max(row[first], row[last + 1 - (1 << level)])
