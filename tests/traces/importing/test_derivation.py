"""From a measured profile to a trace: what is taken over, what derived, what modelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.importing.profile_folders import (
    BACKWARD_SIZES,
    FORWARD_SIZES,
    INPUTS,
    LAYERS,
    WEIGHTS,
    backward_ns,
    forward_ns,
    write,
)
from traces.costs import Costs
from traces.importing import import_trace
from traces.schema import Phase, Provenance, Trace

REFERENCE = Path(__file__).parents[4] / "shared" / "reference" / "gtx1080ti"
MODELS = sorted(folder.name for folder in REFERENCE.iterdir() if folder.is_dir()) if REFERENCE.exists() else []


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return import_trace(write(tmp_path)).trace


def test_times_are_the_measured_ones_and_backward_is_without_recompute(trace: Trace) -> None:
    costs = Costs(trace)
    assert costs.microbatches(Phase.FORWARD) == FORWARD_SIZES
    assert costs.microbatches(Phase.BACKWARD) == BACKWARD_SIZES
    for layer in range(LAYERS):
        for u in BACKWARD_SIZES:
            assert costs.forward_ns(layer, layer, u) == forward_ns(layer, u)
            assert costs.backward_ns(layer, layer, u) == backward_ns(layer, u) - forward_ns(layer, u)
        assert costs.update_ns(layer, layer, Phase.UPDATE_CPU) == WEIGHTS[layer]
    assert {row.provenance for row in trace.times if row.phase is not Phase.UPDATE_GPU} == {Provenance.IMPORTED}


def test_updates_on_the_gpu_move_what_they_read_and_write(trace: Trace) -> None:
    """7 x the weights under Adam (24 bytes of states read and written, 4 of weights twice, 4 of gradients)."""
    rows = [row for row in trace.times if row.phase is Phase.UPDATE_GPU]
    assert [row.layer for row in rows] == [0, 1]
    assert rows[1].duration_ns == pytest.approx(7 * 8_000_000 / (484 * 0.72), rel=1e-6)
    assert {row.provenance for row in rows} == {Provenance.MODELLED}


def test_updates_on_a_gpu_that_is_not_known_stay_unknown(tmp_path: Path) -> None:
    imported = import_trace(write(tmp_path), device="another")
    assert not [row for row in imported.trace.times if row.phase is Phase.UPDATE_GPU]
    assert any("are not known, nor is a GPU 'another'" in note for note in imported.notes)


def test_a_layers_own_memory_is_its_peak_less_weights_buffers_and_input(trace: Trace) -> None:
    costs = Costs(trace)
    for layer in range(LAYERS):
        for u in BACKWARD_SIZES:
            assert costs.forward_workspace_bytes(layer, layer, u) == 3_000 * u
            assert costs.backward_workspace_bytes(layer, layer, u) == WEIGHTS[layer] + 10_000 * u


def test_saved_bytes_have_the_best_bound_of_all_sizes(trace: Trace) -> None:
    """Gradients (layer 0) inflate it least at the largest size, and nothing but the 4 bytes of loss at the least."""
    costs = Costs(trace)
    assert costs.saved_bytes(0, 0, 2) == 4_000_000 + 20_000 - 2 * INPUTS[1]
    assert costs.saved_bytes(0, 0, 1) == costs.saved_bytes(0, 0, 2) // 2
    assert [costs.saved_bytes(2, 2, u) for u in (1, 2)] == [10_000 - 4, 20_000 - 8]


def test_sizes_say_that_they_are_imported_and_memory_that_it_is_modelled(trace: Trace) -> None:
    costs = Costs(trace)
    assert costs.size_provenance(0, 2) is Provenance.IMPORTED
    assert costs.memory_provenance(0, 2) is Provenance.MODELLED
    assert costs.size_provenance(0, 3) is costs.memory_provenance(0, 3) is Provenance.INTERPOLATED


@pytest.mark.skipif(not MODELS, reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("model", MODELS)
def test_measured_profiles_come_over_unchanged(model: str) -> None:
    """Against the tables read anew, cell by cell, by other means."""
    import pandas as pd

    folder = REFERENCE / model
    costs = Costs(import_trace(folder).trace)
    last = costs.layer_count - 1
    times = pd.read_csv(folder / "layer_time.csv").pivot_table(
        index=["phase", "microbatch"], values="gpu_seconds", aggfunc="sum"
    )["gpu_seconds"]
    for u in costs.microbatches(Phase.FORWARD):
        assert costs.forward_ns(0, last, u) == pytest.approx(times["FWD", u] * 1e9, abs=last + 1)
    for u in costs.microbatches(Phase.BACKWARD):
        own = times["BWD", u] - times["FWD", u]
        assert costs.backward_ns(0, last, u) == pytest.approx(own * 1e9, abs=last + 1)
    inputs = pd.read_csv(folder / "activation.csv").set_index(["microbatch", "layer"])["input_bytes"]
    for (u, layer), size in inputs.items():
        assert costs.input_bytes(layer, u) == size
    sizes = pd.read_csv(folder / "layer_size.csv")
    assert costs.weight_bytes(0, last) == sizes["weight_bytes"].sum()
    assert costs.buffer_bytes(0, last) == sizes["buffer_bytes"].sum()
    assert costs.optimizer_state_bytes(0, last) == sizes["optimizer_state_bytes"].sum()
    updates = pd.read_csv(folder / "update_time.csv")["cpu_seconds"].sum()
    assert costs.update_ns(0, last, Phase.UPDATE_CPU) == pytest.approx(updates * 1e9, abs=last + 1)
    peaks = pd.read_csv(folder / "layer_memory.csv").set_index(["phase", "microbatch", "layer"])["bytes"]
    for layer in range(last + 1):
        for u in costs.microbatches(Phase.BACKWARD)[::5]:
            held = costs.weight_bytes(layer, layer) + costs.buffer_bytes(layer, layer) + inputs[u, layer]
            assert held + costs.forward_workspace_bytes(layer, layer, u) == peaks["FWD", u, layer]
            assert held + costs.backward_workspace_bytes(layer, layer, u) == peaks["BWD", u, layer]
