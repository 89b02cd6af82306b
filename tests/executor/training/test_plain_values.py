from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.training.plain_values import CannotBeStored, decode, encode
from executor.training.tensor_files import TensorTable
from tests.executor.training.equality import assert_equal

TENSORS = st.integers(0, 3).map(lambda size: torch.arange(size) + size)
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tensor", "$float", "$", "a"]), inner, max_size=2)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    table = TensorTable()
    encoded = msgspec.json.decode(msgspec.json.encode(encode(value, "it", table)))
    return decode(encoded, lambda name: table.tensors[name].clone())


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert_equal(through_json(value), value)


def test_a_tensor_at_two_places_is_stored_once() -> None:
    table, tensor = TensorTable(), torch.arange(3)
    encoded = encode({"a": tensor, "b": [tensor, tensor[:2], tensor.view(3, 1)]}, "it", table)
    assert encoded == {"a": {"$tensor": "it/a"}, "b": [{"$tensor": name} for name in ("it/a", "it/b/1", "it/b/2")]}


def test_names_that_would_be_the_same_are_told_apart() -> None:
    value = {"a": {"b/c": torch.zeros(1)}, "a/b": {"c": torch.ones(1)}, 5: [torch.zeros(0)], "5/0": torch.ones(0, 2)}
    assert_equal(through_json(value), value)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", [torch.float32], {"a": len}])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(CannotBeStored, match=r"it(/0|/a)? is a .*; only numbers, texts"):
        encode(value, "it", TensorTable())
