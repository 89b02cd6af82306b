"""Estimates of whole models beside what was measured on a GTX 1080 Ti."""

from __future__ import annotations

import csv
from functools import cache

import pytest

from benchmarks.gpu_references import MEASURED, REFERENCES, Kinds, Reference

WITHIN = 0.15
BESIDE = {"bert": {0: 512 * (8 + 4), 1: 512 * 4}}
"""Bytes of a sample, by kind of layer, that the measured models were given too: token types, and masks of floats."""

estimated = cache(Kinds.estimated)
KINDS = {reference.kinds.name: reference.kinds for reference in REFERENCES}


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("kinds", KINDS.values(), ids=list(KINDS))
def test_whole_models_take_about_what_was_measured(kinds: Kinds) -> None:
    trace = estimated(kinds)
    models = [reference for reference in REFERENCES if reference.kinds is kinds]
    assert {len(reference.repeats) for reference in models} == {len(trace.layers)}
    wrong = {
        (reference.name, *timed): f"{error:+.0%}"
        for reference in models
        for timed, error in reference.errors(trace).items()
        if abs(error) > WITHIN
    }
    assert not wrong


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_weights_and_inputs_have_the_bytes_that_were_measured(reference: Reference) -> None:
    trace = estimated(reference.kinds)
    kinds = [kind for kind, times in enumerate(reference.repeats) for _ in range(times)]
    weights = [trace.layers[kind].weight_bytes for kind in kinds]
    assert weights == [int(row["weight_bytes"]) for row in _table(reference, "layer_size")]
    inputs = {(row.layer, row.microbatch): row.input_bytes for row in trace.sizes}
    beside = BESIDE.get(reference.kinds.name, {})
    compared = 0
    for row in _table(reference, "activation"):
        kind, u = kinds[int(row["layer"])], int(row["microbatch"])
        if (kind, u) in inputs:
            assert int(row["input_bytes"]) == inputs[kind, u] + beside.get(kind, 0) * u
            compared += 1
    assert compared >= 3 * len(kinds)


def _table(reference: Reference, name: str) -> list[dict[str, str]]:
    with (MEASURED / reference.folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))
