"""CUDA devices at the façade, and schedules at work on them. With ``pytest -m gpu``, where there are CUDA devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from executor.devices.cuda import CudaDevices
from executor.devices.facade import Copy, DeviceKind, Sum
from executor.errors import DeviceError
from executor.models import workloads
from sim.plan import Plan, Policy, UpdateOn
from sim.schedule import Lane
from sim.timelines.metrics import observed_peak_bytes
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    GPT2_PACKS,
    Make,
    Ran,
    chain,
    differences,
    dp_swap,
    gpt2,
    harmony,
    moved_in,
    name_of,
    one_step,
    plainly,
    plans,
    tied_chain,
    train,
)
from tests.sim.closed_forms import moved

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param(make, plan, id=f"{make.__name__}-{name_of(plan)}")
    for make, packs in ((chain, CHAIN_PACKS), (gpt2, GPT2_PACKS))
    for gpus in (1, 2)
    for plan in plans(packs, gpus)
]
every_case = pytest.mark.parametrize(("make", "plan"), CASES)


def need(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices, of {gpus}")


def step_on_cuda(make: Make, plan: Plan) -> Ran:
    need(plan.gpus)
    return one_step(make, plan, DeviceKind.CUDA)


@every_case
def test_gradients_are_those_of_plain_training(make: Make, plan: Plan) -> None:
    assert differences(step_on_cuda(make, plan).trained, plainly(make)) == {}


@every_case
def test_a_run_moves_what_was_scheduled_within_the_planned_memory(make: Make, plan: Plan) -> None:
    ran = step_on_cuda(make, plan)
    assert moved_in(ran.timeline) == moved(ran.schedule)
    peaks = zip(observed_peak_bytes(ran.timeline), ran.schedule.memory.gpu_peak_bytes, strict=True)
    assert all(0 < observed <= planned for observed, planned in peaks)


@pytest.mark.parametrize("make", [chain, partial(chain, frozen=True), tied_chain, gpt2])
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP, Policy.DP_SWAP])
@pytest.mark.parametrize("gpus", [1, 2])
def test_several_steps_of_fused_adam_are_those_of_plain_training(make: Make, policy: Policy, gpus: int) -> None:
    need(gpus)
    workload = make()
    last = {"tied chain": 4, "gpt2": 5, "chain": 7}[workload.name]
    plan: Plan = dp_swap(gpus, 3)
    if policy is not Policy.DP_SWAP:
        plan = harmony(policy, gpus, (4, 2), (((0, 0), (1, 1)), ((0, 0), (1, 1), (2, last))), update=UpdateOn.GPU)
    ran = train(
        workload, plan, steps=2, warmup_steps=1, optimizer=workloads.adam, state_tensors=2, device=DeviceKind.CUDA
    )
    assert differences(ran.trained, plainly(make, 3, workloads.adam)) == {}


def test_with_dropout_only_the_cut_counts() -> None:
    need(1)
    make = partial(gpt2, dropout=0.2)
    grouped = train(make(), harmony(Policy.HARMONY_DP, 1, (3, 3), GPT2_PACKS), device=DeviceKind.CUDA)
    paged = train(make(), dp_swap(1, 3), device=DeviceKind.CUDA)
    assert differences(paged.trained, grouped.trained) == {}
    assert differences(grouped.trained, plainly(gpt2)) != {}


def test_more_gpus_than_there_are_are_refused() -> None:
    found = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=rf"has {found + 1} GPU\(s\), there are {found} CUDA devices"):
        CudaDevices(made.machine(found + 1))


class TestFacade:
    @pytest.fixture
    def devices(self) -> CudaDevices:
        need(1)
        return CudaDevices(made.machine(1))

    def test_queues_wait_for_the_marks_of_others(self, devices: CudaDevices) -> None:
        """Copies of 128 MiB are under way for milliseconds when they are waited for."""
        size = 2**27
        source, target = devices.host_bytes(size).fill_(7), devices.host_bytes(size).zero_()
        block = devices.gpu_bytes(0, size)
        inward, compute = devices.queue((0, Lane.SWAP_IN)), devices.queue((0, Lane.COMPUTE))
        outward, host = devices.queue((0, Lane.SWAP_OUT)), devices.queue((None, Lane.UPDATE))
        devices.begin()
        start = inward.mark()
        inward.swap([Copy(block, source)])
        compute.wait(inward.mark())
        compute.compute(lambda: block.add_(1))
        outward.wait(compute.mark())
        outward.swap([Copy(target, block)])
        end = outward.mark()
        host.wait(end)
        assert host.compute(lambda: bool((target == 8).all()))
        devices.finish()
        assert devices.time_ns(start) < devices.time_ns(end)

    def test_memory_may_be_dropped_while_it_is_worked_on(self, devices: CudaDevices) -> None:
        size = 2**27
        inward, outward = devices.queue((0, Lane.SWAP_IN)), devices.queue((0, Lane.SWAP_OUT))
        source, target = devices.host_bytes(size).fill_(7), devices.host_bytes(size)
        devices.begin()
        block = devices.gpu_bytes(0, size)
        inward.swap([Copy(block, source)])
        outward.wait(inward.mark())
        outward.swap([Copy(target, block)])
        del block
        other = devices.gpu_bytes(0, size)
        inward.swap([Copy(other, devices.host_bytes(size).zero_())])
        devices.finish()
        assert bool((target == 7).all())

    def test_host_memory_is_pinned(self, devices: CudaDevices) -> None:
        assert devices.host_bytes(100).is_pinned()


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_all_reduce_leaves_the_sum_in_rank_order_everywhere(count: int) -> None:
    need(2)
    devices = CudaDevices(made.machine(2))
    values = [torch.randn(count) for _ in range(2)]
    collective = devices.queue((None, Lane.COLLECTIVE))
    shares = [value.to(devices.device(gpu)) for gpu, value in enumerate(values)]
    devices.begin()
    collective.all_reduce(shares)
    devices.finish()
    assert all(torch.equal(share.cpu(), values[0] + values[1]) for share in shares)


def test_reduce_scatter_and_all_gather_make_an_all_reduce() -> None:
    need(2)
    devices = CudaDevices(made.machine(2))
    values = [torch.randn(1000) for _ in range(2)]
    collective = devices.queue((None, Lane.COLLECTIVE))
    parts = [value.to(devices.device(gpu)).tensor_split(2) for gpu, value in enumerate(values)]
    devices.begin()
    collective.reduce_scatter([Sum(parts[own][own], [part[own] for part in parts]) for own in range(2)], 2)
    collective.all_gather([Copy(parts[to][own], parts[own][own]) for own in range(2) for to in range(2)], 2)
    devices.finish()
    assert all(torch.equal(torch.cat(part).cpu(), values[0] + values[1]) for part in parts)
