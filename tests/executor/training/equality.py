"""Equality of nested values with tensors in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def assert_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Of the same types, and bit for bit, or but for a tolerance of floating point numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key], tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, tolerance)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=0, abs=tolerance, nan_ok=True)
    else:
        assert found == expected
