import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from executor.errors import ModelError, WorkloadError
from executor.measuring.bench import layer_tensors
from executor.measuring.profile import default_microbatches, profile
from executor.models.data import next_token_loss, text_batches
from executor.models.workloads import Workload
from executor.running.compute import Chance, GpuModel
from executor.running.storage import measure_memory
from tests.executor.trained import skips
from traces.checks import check_trace
from traces.costs import Costs
from traces.schema import Phase, SizeRow, TiedWeight, Trace

torch.set_num_threads(1)
CPU = torch.device("cpu")
mse = nn.functional.mse_loss


def regression(model: nn.Module, inputs: int = 4, outputs: int = 2) -> Workload:
    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(samples, inputs, generator=generator), torch.zeros(samples, outputs)

    return Workload("regression", model, mse, batch)


def tiny_gpt2(dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=2,
        n_positions=16,
        vocab_size=256,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Workload("tiny", GPT2LMHeadModel(config), next_token_loss, text_batches(16))


def convolutional() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 32),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()),
        nn.Linear(32, 5),
    )
    loss = nn.CrossEntropyLoss(torch.ones(5))
    return Workload("conv", model, loss, lambda n, seed: (torch.randn(n, 3, 8, 8), torch.arange(n) % 5))


def quick(workload: Workload, *sizes: int, **options) -> Trace:
    trace = profile(workload, microbatches=sizes, warmups=0, repeats=1, **options)
    check_trace(trace, "profile")
    return trace


class TestSizes:
    def test_of_linear_and_relu_are_those_counted_by_hand(self):
        workload = regression(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        trace = quick(replace(workload, loss_fn=lambda logits, labels: logits.mean()), 2, 5)
        sizes = {(row.layer, row.microbatch): row for row in trace.sizes}
        for u in (2, 5):
            x0, x1, x3 = 4 * 4 * u, 4 * 3 * u, 4 * 2 * u
            # Linear: saves nothing of its own. Backward holds the incoming gradient and makes the three others.
            assert sizes[0, u] == SizeRow(
                layer=0,
                microbatch=u,
                input_bytes=x0,
                output_bytes=x1,
                input_gradient_bytes=x0,
                saved_bytes=x1,
                workspace_bytes=(x1 + x0 + 4 * (4 * 3 + 3)) - x1,
                forward_workspace_bytes=x1,
                unrecomputed_workspace_bytes=x0 + 4 * (4 * 3 + 3),
            )
            # ReLU saves its output, and in backward there are two gradients beside it.
            assert sizes[1, u] == SizeRow(
                layer=1,
                microbatch=u,
                input_bytes=x1,
                output_bytes=x1,
                input_gradient_bytes=x1,
                saved_bytes=x1,
                workspace_bytes=2 * x1,
                forward_workspace_bytes=x1,
                unrecomputed_workspace_bytes=x1,
            )
            # The loss is one number; its gradient, and then that of the logits, take its place.
            assert sizes[3, u] == SizeRow(
                layer=3,
                microbatch=u,
                input_bytes=x3,
                output_bytes=4,
                input_gradient_bytes=x3,
                saved_bytes=4,
                workspace_bytes=x3,
                forward_workspace_bytes=4,
                unrecomputed_workspace_bytes=x3,
            )

    def test_what_passes_by_takes_no_memory_of_its_own(self):
        trace = quick(skips(), 2)
        sizes = {row.layer: row for row in trace.sizes}
        vector, mask = 2 * 6 * 8, 2 * 6
        assert [sizes[layer].input_bytes for layer in (0, 1, 2, 3)] == [vector + mask] * 2 + [2 * vector + mask] + [
            vector + mask
        ]
        assert [sizes[layer].input_gradient_bytes for layer in (0, 1, 2, 3)] == [0, vector, 2 * vector, vector]
        assert [sizes[layer].relayed_bytes for layer in (0, 1, 2, 3)] == [mask, vector + mask, mask, 0]

    def test_integer_inputs_have_no_gradient(self):
        trace = quick(tiny_gpt2(), 2)
        assert trace.sizes[0].input_bytes == 2 * 16 * 8
        assert trace.sizes[0].input_gradient_bytes == 0
        assert trace.label_bytes_per_sample == 16 * 8

    @pytest.mark.parametrize("make", [tiny_gpt2, lambda: tiny_gpt2(0.1), convolutional, skips])
    def test_add_up_to_what_any_pack_takes_at_most(self, make: Callable[[], Workload]):
        workload, u = make(), 3
        costs = Costs(quick(workload, u))
        model = workload.layers()
        gpu, last = GpuModel(model), len(model) - 1
        tensors = {layer: layer_tensors(model, layer, CPU) for layer in range(len(model))}
        chance = Chance(torch.default_generator, 0, 0, 0)
        inputs, labels = workload.checked_batch(u, 0)
        xs = [inputs.tensors]
        every = [*inputs.tensors, labels]
        gpu.forward(range(len(model)), every, tensors, chance, lambda _, x: xs.append(tuple(map(torch.clone, x))))
        tightest = 0.0
        for first, end in itertools.combinations(range(len(model) + 1), 2):
            run = range(first, end)
            args = [*xs[first], labels] if end > last else xs[first]
            with measure_memory(CPU) as forward:
                gpu.forward(run, args, tensors, chance, lambda _, x: None)
            assert forward.peak_bytes <= costs.forward_workspace_bytes(first, end - 1, u)
            gradient = 1.0 if end > last else [torch.ones_like(x) for x in gpu.taking(end - 1, xs[end])]
            with measure_memory(CPU) as backward:
                result = gpu.backward(run, args, gradient, tensors, chance, first_time=False)
            scalars = 2 * xs[-1][0].nbytes if end > last else 0  # the loss and its gradient
            planned = costs.backward_workspace_bytes(first, end - 1, u) + scalars
            assert backward.peak_bytes <= planned
            tightest = max(tightest, backward.peak_bytes / planned)
            del result
        assert tightest == 1.0


def test_a_model_without_memory_is_measured_with_made_up_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    shapes, real = quick(regression(model), 2), quick(regression(copy.deepcopy(model).to_empty(device="cpu")), 2)
    assert (shapes.layers, shapes.sizes) == (real.layers, real.sizes)
    assert all(parameter.is_meta for parameter in model.parameters())


class TestLayers:
    def test_state_is_that_of_the_optimizer(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        adam = quick(regression(model), 1)
        assert [layer.optimizer_state_bytes for layer in adam.layers] == [2 * 60, 0, 2 * 32, 0]
        assert adam.optimizer == "Adam"
        plain = quick(regression(model), 1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        assert [layer.optimizer_state_bytes for layer in plain.layers] == [0, 0, 0, 0]
        momentum = quick(regression(model), 1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        assert [layer.optimizer_state_bytes for layer in momentum.layers] == [60, 0, 32, 0]

    def test_the_tied_head_belongs_to_the_embedding(self):
        trace = quick(tiny_gpt2(), 1)
        tied = TiedWeight(group="transformer.wte.weight", weight_bytes=4 * 256 * 32)
        assert [layer.tied for layer in trace.layers] == [(tied,), (), (), (), (), (tied,), ()]
        assert trace.layers[5].weight_bytes == 4 * 256 * 32
        assert trace.layers[5].optimizer_state_bytes == 0
        assert trace.layers[0].optimizer_state_bytes == 2 * 4 * (256 + 16) * 32

    def test_marks_frozen_layers(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].requires_grad_(False)
        trace = quick(regression(model), 1)
        assert [layer.trainable for layer in trace.layers] == [True, False, True, True]
        assert trace.layers[1].gradient_bytes == 0
        assert {row.layer for row in trace.times if row.phase.is_update} == {0, 2}

    def test_marks_layers_that_depend_on_the_cut_or_on_chance(self):
        trace = quick(convolutional(), 2)
        assert [at for at, layer in enumerate(trace.layers) if layer.cut_sensitive] == [1, 3]
        assert [at for at, layer in enumerate(trace.layers) if layer.changes_buffers] == [1]
        assert trace.layers[-1].buffer_bytes == 20  # class weights

    def test_finds_chance_that_no_class_tells_of(self):
        class Noise(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.dropout(x, 0.5)

        trace = quick(regression(nn.Sequential(nn.Linear(4, 2), Noise())), 8)
        assert [layer.cut_sensitive for layer in trace.layers] == [False, True, False]


class TestTimes:
    def test_every_layer_has_every_phase_at_every_size(self):
        trace = quick(tiny_gpt2(), 1, 2)
        rows = {(row.phase, row.layer, row.microbatch) for row in trace.times}
        runs = {(phase, layer, u) for phase in (Phase.FORWARD, Phase.BACKWARD) for layer in range(7) for u in (1, 2)}
        updates = {(phase, layer, 0) for phase in (Phase.UPDATE_CPU, Phase.UPDATE_GPU) for layer in range(5)}
        assert rows == runs | updates
        assert len(trace.times) == len(rows)

    def test_backward_is_what_is_timed_less_forward(self, monkeypatch: pytest.MonkeyPatch):
        ticks = itertools.count(1)

        def clock(work: Callable[[], object]) -> int:
            work()
            return 1_000 * next(ticks)  # 1000, 2000, …: forward and both together of a layer, then of the next

        monkeypatch.setattr("executor.measuring.instruments.SteadyClock", lambda: clock)
        trace = quick(regression(nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), 1)
        durations = {(row.phase, row.layer): row.duration_ns for row in trace.times}
        assert durations == {
            (Phase.FORWARD, 0): 1_000,
            (Phase.BACKWARD, 0): 1_000,
            (Phase.FORWARD, 1): 3_000,
            (Phase.BACKWARD, 1): 1_000,
            (Phase.UPDATE_CPU, 1): 5_000,
            (Phase.UPDATE_GPU, 1): 6_000,
            (Phase.FORWARD, 2): 7_000,
            (Phase.BACKWARD, 2): 1_000,
        }

    def test_layers_that_are_alike_share_their_times(self):
        trace = quick(tiny_gpt2(), 1)
        blocks = [[(r.phase, r.duration_ns) for r in trace.times if r.layer == layer] for layer in (1, 2, 3)]
        assert blocks[0] == blocks[1] == blocks[2]

    def test_counts_warm_ups_and_repeats(self):
        trace = profile(regression(nn.Sequential(nn.Linear(4, 2))), microbatches=[1], warmups=1, repeats=4)
        assert (trace.warmups, trace.repeats, trace.threads, trace.device) == (1, 4, 1, "cpu")


class TestLeavesAsItWas:
    def test_the_model(self):
        workload = convolutional()
        before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
        quick(workload, 2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in workload.model.state_dict().items())
        assert all(parameter.grad is None for parameter in workload.model.parameters())

    def test_the_random_state(self):
        workload = tiny_gpt2(dropout=0.1)
        state = torch.get_rng_state()
        quick(workload, 1)
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_number_of_threads(self):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            quick(regression(nn.Sequential(nn.Linear(4, 2))), 1)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


class Wrong(nn.Module):
    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> object:
        return self.change(x)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ValueError("no way back")


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class TestRefusals:
    @pytest.mark.parametrize(
        ("layer", "expected"),
        [
            (Wrong(lambda x: (x, x)), "layer 1 returned 2 tensors; it must return one tensor"),
            (Wrong(lambda x: x.sum()), r"layer 1 \(Wrong\) makes shape \(\) of 3 sample"),
            (Wrong(lambda x: x.t()), r"layer 1 \(Wrong\) makes shape \(4, 3\) of 3 sample"),
            (Wrong(lambda x: x.to_sparse()), r"layer 1 .* layout torch.sparse_coo"),
            (nn.Linear(5, 2), r"layer 1 \(Linear\) fails on an input of shape \(3, 4\).*RuntimeError"),
            (Wrong(Broken.apply), r"layer 1 \(Wrong\) fails on an input of shape \(3, 4\).*ValueError: no way back"),
            (Wrong(lambda x: x.add_(1)), r"layer 1 \(Wrong\) fails on an input of shape \(3, 4\).*in-place"),
            (WithUnused(), r"layer 1 .* does not use its parameter\(s\) 1\.unused\.weight, 1\.unused\.bias"),
        ],
    )
    def test_name_the_layer(self, layer: nn.Module, expected: str):
        with pytest.raises(ModelError, match=expected):
            quick(regression(nn.Sequential(nn.Linear(4, 4), layer)), 3)

    def test_name_the_layer_that_fails_only_after_a_while(self):
        calls = itertools.count()

        def tires(x: Tensor) -> Tensor:
            if next(calls) == 12:
                raise ValueError("tired")
            return x

        with pytest.raises(ModelError, match=r"layer 1 \(Wrong\) fails on an input of shape .*ValueError: tired"):
            quick(regression(nn.Sequential(nn.Linear(4, 2), Wrong(tires))), 1, 2, 3)

    def test_a_loss_that_is_no_scalar(self):
        workload = regression(nn.Sequential(nn.Linear(4, 2)))
        with pytest.raises(ModelError, match=r"the loss has shape \(3, 2\)"):
            quick(Workload("w", workload.model, nn.MSELoss(reduction="none"), workload.batch), 3)

    def test_a_loss_that_is_a_sum_over_the_samples(self):
        workload = regression(nn.Sequential(nn.Linear(4, 2)))
        with pytest.raises(ModelError, match=r"the loss of 3 sample.*must be the mean over the samples"):
            quick(replace(workload, loss_fn=nn.MSELoss(reduction="sum")), 3)

    def test_a_loss_through_which_nothing_is_learned(self):
        workload = regression(nn.Sequential(nn.Linear(4, 2)))
        with pytest.raises(ModelError, match="the loss does not depend on the model's output"):
            quick(replace(workload, loss_fn=lambda logits, labels: mse(logits, labels).detach()), 3)

    @pytest.mark.parametrize(
        ("batch", "expected"),
        [
            (lambda n, seed: torch.zeros(n, 4), "must return \\(inputs, labels\\)"),
            (lambda n: None, r"called with \(3, 0\) for \(samples, seed\), failed: TypeError"),
            (lambda n, seed: ({"x": 1}, torch.zeros(n, 2)), "inputs are dict"),
            (lambda n, seed: (torch.zeros(7, 4), torch.zeros(n, 2)), r"inputs have shape \(7, 4\), but 3 samples"),
            (lambda n, seed: (torch.zeros(n, 4), torch.zeros(())), r"labels have shape \(\)"),
        ],
    )
    def test_batches_of_another_form(self, batch: Callable, expected: str):
        with pytest.raises(WorkloadError, match=expected):
            quick(Workload("w", nn.Sequential(nn.Linear(4, 2)), mse, batch), 3)

    def test_nothing_to_train(self):
        with pytest.raises(WorkloadError, match="every parameter is frozen"):
            quick(regression(nn.Sequential(nn.Linear(4, 2).requires_grad_(False))), 1)
        with pytest.raises(WorkloadError, match="no parameters; there is nothing to train"):
            quick(regression(nn.Sequential(nn.ReLU())), 1)

    @pytest.mark.parametrize("sizes", [[], [0, 1]])
    def test_senseless_sizes(self, sizes: list[int]):
        with pytest.raises(WorkloadError, match="microbatch sizes are"):
            profile(regression(nn.Sequential(nn.Linear(4, 2))), microbatches=sizes)

    def test_no_repeats(self):
        with pytest.raises(WorkloadError, match="0 repeats leave nothing"):
            profile(regression(nn.Sequential(nn.Linear(4, 2))), microbatches=[1], repeats=0)


@pytest.mark.parametrize(
    ("minibatch", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (8, (1, 2, 3, 4, 6, 8)),
        (13, (1, 2, 3, 4, 6, 8, 12, 13)),
        (16, (1, 2, 3, 4, 6, 8, 12, 16)),
    ],
)
def test_default_sizes_reach_the_minibatch(minibatch: int, expected: tuple[int, ...]):
    assert default_microbatches(minibatch) == expected
