"""Estimates for RTX 4090s, where nothing was measured by us, beside throughput that others published."""

from __future__ import annotations

import pytest

from benchmarks.bench_published import ROUNDPIPE, Published


@pytest.mark.parametrize("published", ROUNDPIPE, ids=lambda each: f"{each.model}-{each.gpus}")
def test_throughput_is_about_what_was_published(published: Published) -> None:
    assert published.predicted(8192) == pytest.approx(published.throughput, rel=0.2)
