import msgspec
import pytest
import torch
from torch import nn

from executor.estimating.estimate import estimate
from executor.estimating.gpus import VERSION, known_gpu
from executor.estimating.shipped import SHIPPED
from executor.measuring.profile import profile
from executor.models.data import class_loss, next_token_loss, text_batches
from executor.models.published import transformer
from executor.models.workloads import Workload, load_workload
from traces.checks import check_trace
from traces.files import encode_trace, load_trace, shipped_traces
from traces.schema import Phase, Provenance, Trace

UNFUSED, FUSED = known_gpu("2080ti"), known_gpu("4090")


def tiny_gpt2(dropout: float = 0.0, attention: str = "eager") -> Workload:
    options = {
        "n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 256, "bos_token_id": None,
        "eos_token_id": None, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        "attn_implementation": attention,
    }  # fmt: skip
    return Workload("tiny", transformer("GPT2", "LMHeadModel", options), next_token_loss, text_batches(16))


def convolutional() -> Workload:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 5)),
    )
    loss = nn.CrossEntropyLoss(torch.ones(5))
    return Workload("conv", model, loss, lambda n, seed: (torch.randn(n, 3, 8, 8), torch.arange(n) % 5))


def checked(trace: Trace) -> Trace:
    check_trace(trace, "estimate")
    return trace


@pytest.mark.parametrize("make", [tiny_gpt2, convolutional])
def test_sizes_are_those_that_a_profile_measures(make) -> None:
    workload = make()
    estimated = checked(estimate(workload, UNFUSED, microbatches=(2, 5), in_parts=True))
    measured = profile(workload, microbatches=(2, 5), warmups=0, repeats=1, in_parts=True)
    assert estimated.layers == measured.layers
    modelled = [msgspec.structs.replace(row, provenance=Provenance.MODELLED) for row in measured.sizes]
    assert modelled == list(estimated.sizes)
    assert (estimated.label_bytes_per_sample, estimated.optimizer) == (measured.label_bytes_per_sample, "Adam")
    key = [(row.layer, row.phase, row.microbatch) for row in measured.times]
    assert [(row.layer, row.phase, row.microbatch) for row in estimated.times] == key


def test_every_number_is_modelled_and_every_time_is_there() -> None:
    trace = checked(estimate(tiny_gpt2(0.1), FUSED, microbatches=(1, 4), dtype="bfloat16"))
    assert {row.provenance for row in (*trace.times, *trace.sizes)} == {Provenance.MODELLED}
    assert (trace.device, trace.dtype) == ("RTX 4090", "bfloat16")
    times = {(row.layer, row.phase, row.microbatch): row.duration_ns for row in trace.times}
    assert all(
        times[layer, phase, u] > 0 for layer in range(6) for phase in (Phase.FORWARD, Phase.BACKWARD) for u in (1, 4)
    )


def test_the_model_stays_as_it_is() -> None:
    workload = tiny_gpt2(attention="sdpa")
    estimate(workload, UNFUSED, microbatches=(1,), dtype="float16")
    assert {(parameter.dtype, parameter.device.type) for parameter in workload.model.parameters()} == {
        (torch.float32, "cpu")
    }
    assert workload.model.config._attn_implementation == "sdpa"


def test_halves_take_half_the_bytes() -> None:
    whole = estimate(load_workload("mlp"), FUSED, microbatches=(4,))
    half = estimate(load_workload("mlp"), FUSED, microbatches=(4,), dtype="float16")
    assert [2 * layer.weight_bytes for layer in half.layers] == [layer.weight_bytes for layer in whole.layers]
    assert [2 * row.output_bytes for row in half.sizes[:-1]] == [row.output_bytes for row in whole.sizes[:-1]]


def test_updates_move_weights_gradients_and_state() -> None:
    workload = Workload(
        "one",
        nn.Sequential(nn.Linear(100, 50)),
        class_loss,
        lambda n, seed: (torch.randn(n, 100), torch.zeros(n, dtype=torch.long)),
    )
    trace = estimate(workload, FUSED, microbatches=(1,), host_bandwidth=28e9)
    (host,) = [row for row in trace.times if row.phase is Phase.UPDATE_CPU]
    assert host.duration_ns == pytest.approx(50 * 100 + 50, abs=1)
    sgd = estimate(
        workload,
        FUSED,
        microbatches=(1,),
        host_bandwidth=12e9,
        optimizer=lambda parameters: torch.optim.SGD(parameters),
    )
    (host,) = [row for row in sgd.times if row.phase is Phase.UPDATE_CPU]
    assert host.duration_ns == pytest.approx(50 * 100 + 50, abs=1)


def test_fused_attention_saves_no_scores() -> None:
    workload = tiny_gpt2(0.1, attention="sdpa")
    saved = {
        gpu.name: next(row.saved_bytes for row in estimate(workload, gpu, microbatches=(2,)).sizes if row.layer == 1)
        for gpu in (FUSED, UNFUSED)
    }
    scores = 4 * 2 * 2 * 16 * 16
    assert saved[FUSED.name] + scores <= saved[UNFUSED.name]


@pytest.mark.parametrize("name", ["llama3.1-8b@rtx-4090", "bert-large@gtx-1080-ti"])
def test_shipped_estimates_are_what_is_estimated_now(name: str) -> None:
    (described,) = (each for each in SHIPPED if each.name == name)
    shipped = load_trace(name)
    now = msgspec.structs.replace(described.estimated(), framework=shipped.framework)
    assert encode_trace(now) == encode_trace(shipped)


def test_all_described_estimates_are_shipped() -> None:
    assert {each.name for each in SHIPPED} <= set(shipped_traces())
    current = {load_trace(each.name).modelled_by for each in SHIPPED}
    assert current == {f"harmony estimate {VERSION}"}
