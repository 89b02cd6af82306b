import pytest
import torch
from torch import nn

from executor.estimating.estimate import estimate
from executor.estimating.gpus import known_gpu
from executor.estimating.masters import MASTER, AdamWithMasters
from executor.models.data import class_loss
from executor.models.workloads import Workload


def test_float32_is_updated_as_adam_does() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    optimizers = AdamWithMasters([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    for step in range(5):
        for parameter in (ours, theirs):
            parameter.grad = torch.linspace(-step, 2, 7)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_what_half_precision_loses_the_copy_keeps() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamWithMasters([parameter], lr=1e-3)
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state[MASTER], torch.full((3,), 1 - 4e-3))
    assert torch.equal(parameter, state[MASTER].bfloat16())
    assert {state[name].dtype for name in (MASTER, "exp_avg", "exp_avg_sq")} == {torch.float32}


def test_estimated_updates_move_28_bytes_of_each_parameter() -> None:
    workload = Workload(
        "one",
        nn.Sequential(nn.Linear(100, 50)),
        class_loss,
        lambda n, seed: (torch.randn(n, 100), torch.zeros(n, dtype=torch.long)),
    )
    trace = estimate(
        workload, known_gpu("4090"), microbatches=(1,), dtype="bfloat16", optimizer=AdamWithMasters, host_bandwidth=28e9
    )
    (host,) = (row for row in trace.times if row.phase.value == "update_cpu")
    assert host.duration_ns == pytest.approx(5050, abs=1)
    assert [layer.optimizer_state_bytes for layer in trace.layers] == [12 * 5050, 0]
