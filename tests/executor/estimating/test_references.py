"""Estimates of whole models beside what was measured on a GTX 1080 Ti."""

from __future__ import annotations

import pytest

from benchmarks.gpu_references import MEASURED, REFERENCES, Kinds, Reference

WITHIN = 0.15

KINDS = {reference.kinds.name: reference.kinds for reference in REFERENCES}


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("kinds", KINDS.values(), ids=list(KINDS))
def test_whole_models_take_about_what_was_measured(kinds: Kinds) -> None:
    trace = kinds.estimated()
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
def test_models_have_as_many_layers_as_were_measured(reference: Reference) -> None:
    table = (MEASURED / reference.folder / "update_time.csv").read_text().splitlines()
    assert sum(reference.repeats) == len(table) - 1
