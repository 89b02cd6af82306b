from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import pytest
import torch

from executor.devices import emulated
from executor.devices.emulated import EmulatedDevices, nominal_machine
from executor.devices.facade import Aborted, Copy, Overruns, Sum
from executor.devices.links import Load
from executor.devices.processor import YARDSTICK_NS, SteadyClock
from sim.errors import MachineError
from sim.hardware.machine import Emulation, Gpu, Host, Link, Machine
from sim.schedule import Lane
from tests.executor import made


def machine() -> Machine:
    return Machine(
        name="here",
        host=Host(memory_bytes=None, dram_bandwidth=5e9, cores=2, speed=0.5),
        gpus=(Gpu(name="g", memory_bytes=100, bandwidth=3e9, link="up", copy_overhead_ns=7, speed=0.25),) * 2,
        links=(Link(name="up", bandwidth=4e9, latency_ns=9),),
        emulation=Emulation(pace=4, gpu_bandwidth=1e9, p2p_bandwidth=2e9, links={"up": 1.5e9}),
    )


def test_nominal_machine_has_the_rates_of_the_emulation_and_no_delays() -> None:
    nominal = nominal_machine(machine())
    assert [(link.bandwidth, link.latency_ns) for link in nominal.links] == [(1.5e9, 0)]
    assert {(gpu.bandwidth, gpu.p2p_bandwidth, gpu.copy_overhead_ns) for gpu in nominal.gpus} == {(1e9, 2e9, 0)}
    assert nominal.host.dram_bandwidth == math.inf  # host memory is real here


def test_a_machine_without_emulation_is_refused() -> None:
    bare = Machine(name="bare", host=machine().host, gpus=machine().gpus[:1], links=machine().links)
    with pytest.raises(MachineError, match=r"machine bare cannot be emulated: .*\[emulation\]"):
        EmulatedDevices(bare)


@pytest.mark.parametrize(("gpu", "pace"), [(0, 4), (None, 2)])
def test_mathematics_lasts_its_pace_times_its_steady_time(
    gpu: int | None, pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.devices.emulated.SteadyClock", lambda: SteadyClock(lambda: YARDSTICK_NS // 2))
    queue = EmulatedDevices(machine()).queue((gpu, Lane.COMPUTE))
    spent_ns = 0

    def work() -> str:
        nonlocal spent_ns
        started = time.thread_time_ns()
        while time.thread_time_ns() - started < 5e6:
            pass
        spent_ns = time.thread_time_ns() - started
        return "done"

    start = queue.mark()
    assert queue.compute(work) == "done"
    end = queue.mark()
    assert isinstance(start, int)
    assert isinstance(end, int)
    assert end - start >= pace * 2 * spent_ns  # the processor is twice as fast as the nominal one


def test_waiting_for_other_mathematics_counts_as_overrun_when_it_exceeds_the_pace() -> None:
    devices = EmulatedDevices(machine())
    queue = devices.queue((1, Lane.COMPUTE))
    assert devices.overruns == Overruns(0, 0)
    with emulated._GPUS_TURN:
        thread = threading.Thread(target=queue.compute, args=(lambda: None,))
        thread.start()
        time.sleep(0.03)
    thread.join()
    assert devices.overruns.count == 1
    assert devices.overruns.total_ns > 0
    assert devices.overruns.since(devices.overruns) == Overruns(0, 0)


def test_the_host_does_not_wait_for_the_gpus() -> None:
    queue = EmulatedDevices(machine()).queue((None, Lane.UPDATE))
    with emulated._GPUS_TURN:
        assert queue.compute(lambda: "updated") == "updated"


def test_abort_wakes_what_sleeps_for_its_pace() -> None:
    devices = EmulatedDevices(made.machine(speed=1e-6))
    devices.begin()
    working, aborted = threading.Event(), threading.Event()

    def lane() -> None:
        try:
            devices.queue((0, Lane.COMPUTE)).compute(working.set)
        except Aborted:
            aborted.set()

    thread = threading.Thread(target=lane)
    thread.start()
    working.wait()
    devices.abort()
    thread.join(10)
    assert aborted.is_set()
    with pytest.raises(Aborted):
        devices.queue((0, Lane.COMPUTE)).compute(lambda: None)
    devices.begin()
    devices.queue((0, Lane.COMPUTE)).wait(0)


@pytest.mark.parametrize("lane", [Lane.SWAP_IN, Lane.SWAP_OUT, Lane.P2P_OUT])
@pytest.mark.parametrize("piece_bytes", [64, 2**19])
def test_copies_copy_every_byte(lane: Lane, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(emulated, "PIECE_S", 0)
    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1000, 0, 3, 640)]
    copies = [Copy(torch.zeros_like(source), source) for source in sources]
    queue = EmulatedDevices(made.machine(2)).queue((0, lane))
    if lane is Lane.P2P_OUT:
        queue.send(copies, 1)
    else:
        queue.swap(copies)
    assert all(torch.equal(copy.target, copy.source) for copy in copies)


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_all_reduce_leaves_the_sum_in_rank_order_everywhere(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "PIECE_BYTES", 256)
    shares = [torch.randn(count) for _ in range(3)]
    expected = (shares[0] + shares[1]) + shares[2]  # to the last bit: float addition depends on the order
    EmulatedDevices(made.machine(3)).queue((None, Lane.COLLECTIVE)).all_reduce(shares)
    assert all(torch.equal(share, expected) for share in shares)


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_reduce_scatter_leaves_each_sum_at_its_target_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "PIECE_BYTES", 256)
    first, second, third, held = (torch.randn(count) for _ in range(4))
    before, expected = second.clone(), ((first + second) + third, (held + first) + second)
    sums = [Sum(first, (first, second, third)), Sum(held, (held, first.clone(), second))]
    EmulatedDevices(made.machine(3)).queue((None, Lane.COLLECTIVE)).reduce_scatter(sums, 3)
    assert torch.equal(first, expected[0])
    assert torch.equal(held, expected[1])
    assert torch.equal(second, before)


def test_all_gather_copies() -> None:
    own, others = torch.randn(1000), [torch.zeros(1000) for _ in range(2)]
    collective = EmulatedDevices(made.machine(2)).queue((None, Lane.COLLECTIVE))
    collective.all_gather([Copy(other, own) for other in others], 2)
    assert all(torch.equal(other, own) for other in others)


def test_halves_of_an_all_reduce_load_each_edge_of_the_ring_with_half_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """On three GPUs 8000 bytes: each sends two thirds of them; in an all-reduce, twice."""
    devices = EmulatedDevices(made.machine(3))
    loads: list[list[float]] = []

    def carry(carried: Sequence[Load], work: Iterable[float]) -> None:
        loads.append([load.bytes for load in carried])
        deque(work, maxlen=0)

    monkeypatch.setattr(devices.links, "carry", carry)
    queue = devices.queue((None, Lane.COLLECTIVE))
    whole = [torch.zeros(2000) for _ in range(3)]
    parts = [each.tensor_split(3) for each in whole]
    queue.all_reduce(whole)
    queue.reduce_scatter([Sum(parts[shard][shard], [part[shard] for part in parts]) for shard in range(3)], 3)
    queue.all_gather([Copy(parts[to][shard], parts[shard][shard]) for shard in range(3) for to in range(3)], 3)
    assert loads == [pytest.approx([edge] * 3) for edge in (32000 / 3, 16000 / 3, 16000 / 3)]


def test_running_takes_one_thread_of_torch_and_gives_the_others_back() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with EmulatedDevices(machine()).running():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
