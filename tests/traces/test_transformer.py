"""The modelled GPT-2 traces: parameters and boundaries exact, times near those measured on the real GPU."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest

from traces.checks import check_trace
from traces.costs import Costs
from traces.files import load_trace, shipped_traces
from traces.schema import Phase, Provenance
from traces.transformer import GPT2_FAMILY, GTX_1080_TI, SHIPPED, Gpt2, gpt2_trace

MEASURED = Path(__file__).parents[3] / "shared" / "reference" / "gtx1080ti"
WHOLE_MODEL_BAND = 0.07


def _model(name: str) -> Gpt2:
    return next(model for model in GPT2_FAMILY if model.name == name)


def _table(model: str, name: str) -> list[dict[str, str]]:
    path = MEASURED / model.replace("-", "_") / f"{name}.csv"
    if not path.exists():
        pytest.skip("the measured GTX 1080 Ti profiles are not beside this checkout")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-xl", 1_557_611_200)]
)
def test_parameters_are_those_of_the_published_models(name: str, parameters: int) -> None:
    costs = Costs(gpt2_trace(_model(name), GTX_1080_TI))
    assert sum(costs.owned_weight_bytes(layer) for layer in range(costs.layer_count)) == 4 * parameters
    assert costs.optimizer_state_bytes(0, costs.layer_count - 1) == 8 * parameters


def test_the_head_is_tied_to_the_embedding_which_alone_updates_it() -> None:
    costs = Costs(gpt2_trace(_model("gpt2"), GTX_1080_TI))
    head = costs.layer_count - 2
    assert costs.tied_partners(0) == (head,)
    assert [layer for layer in range(costs.layer_count) if not costs.updates(layer)] == [head, head + 1]
    assert costs.update_ns(head, head + 1, Phase.UPDATE_GPU) == 0


@pytest.mark.parametrize("model", GPT2_FAMILY, ids=lambda model: model.name)
def test_every_member_is_a_valid_modelled_trace_that_grows_with_the_microbatch(model: Gpt2) -> None:
    trace = gpt2_trace(model, GTX_1080_TI, (1, 3))
    check_trace(trace, model.name)
    assert {row.provenance for row in (*trace.times, *trace.sizes)} == {Provenance.MODELLED}
    costs = Costs(trace)
    for ask in (costs.forward_ns, costs.backward_ns, costs.forward_workspace_bytes, costs.backward_workspace_bytes):
        answers = [ask(0, costs.layer_count - 1, u) for u in (1, 2, 3)]
        assert all(small < large for small, large in pairwise(answers))


def test_shipped_traces_are_what_the_model_says_now() -> None:
    assert {f"{model.name}@gtx-1080-ti" for model in SHIPPED} <= set(shipped_traces())
    for name in ("gpt2-xl", "gpt2-10b", "gpt2-100b"):
        assert load_trace(f"{name}@gtx-1080-ti") == gpt2_trace(_model(name), GTX_1080_TI)


@pytest.mark.parametrize("name", ["gpt2-medium", "gpt2-xl", "gpt2-10b", "gpt2-40b"])
def test_sizes_equal_those_measured(name: str) -> None:
    costs = Costs(gpt2_trace(_model(name), GTX_1080_TI))
    rows = _table(name, "layer_size")
    assert len(rows) == costs.layer_count
    for row in rows:
        layer = int(row["layer"])
        assert costs.weight_bytes(layer, layer) == int(row["weight_bytes"])
        assert costs.buffer_bytes(layer, layer) == int(row["buffer_bytes"])
    for row in _table(name, "activation"):
        u = int(row["microbatch"])
        if u <= costs.largest_microbatch():
            assert costs.input_bytes(int(row["layer"]), u) == int(row["input_bytes"])


@pytest.mark.parametrize("name", ["gpt2-xl", "gpt2-10b", "gpt2-40b"])
@pytest.mark.parametrize("u", [1, 2, 4, 8])
def test_forward_and_backward_of_the_whole_model_are_near_those_measured(name: str, u: int) -> None:
    costs = Costs(load_trace(f"{name}@gtx-1080-ti"))
    rows = [row for row in _table(name, "layer_time") if int(row["microbatch"]) == u]
    # The measured backward repeats the forward, so it alone is forward plus backward.
    measured_ns = 1e9 * sum(float(row["gpu_seconds"]) for row in rows if row["phase"] == "BWD")
    last = costs.layer_count - 1
    modelled_ns = costs.forward_ns(0, last, u) + costs.backward_ns(0, last, u)
    assert abs(modelled_ns / measured_ns - 1) < WHOLE_MODEL_BAND


@pytest.mark.parametrize("name", ["gpt2-xl", "gpt2-10b", "gpt2-40b"])
def test_memory_of_a_forward_is_near_that_measured(name: str) -> None:
    costs = Costs(load_trace(f"{name}@gtx-1080-ti"))
    for row in _table(name, "layer_memory"):
        layer, u = int(row["layer"]), int(row["microbatch"])
        if row["phase"] != "FWD" or u not in (2, 4, 8):
            continue
        held = costs.weight_bytes(layer, layer) + costs.buffer_bytes(layer, layer) + costs.input_bytes(layer, u)
        modelled = held + costs.forward_workspace_bytes(layer, layer, u)
        assert abs(modelled / int(row["bytes"]) - 1) < 0.13, (layer, u)
