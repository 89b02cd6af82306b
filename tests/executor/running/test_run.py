"""Schedules at work on emulated GPUs, beside plain PyTorch, the closed forms and the simulator."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from torch import Tensor, nn

from executor.devices.emulated import EmulatedDevices, EmulatedQueue
from executor.devices.facade import DeviceKind, Queue
from executor.errors import DeviceError, DifferentModel, OutOfArena, TaskFailed, WorkspaceOverrun
from executor.models.workloads import Workload
from executor.running.lanes import lane_name
from executor.running.places import Places
from executor.running.run import RunResult, run
from sim.builders import build
from sim.engine.simulate import simulate
from sim.errors import DoesNotFit
from sim.hardware.machine import Machine
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy, Residency, UpdateOn
from sim.schedule import Lane, LaneKey, Schedule, TensorKind
from sim.timelines.compare import compare
from sim.timelines.metrics import observed_host_peak_bytes, observed_peak_bytes
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    CHAIN_STASHES,
    GPT2_PACKS,
    Make,
    adam,
    chain,
    cut_of,
    differences,
    dp_swap,
    gpt2,
    gradient_step,
    harmony,
    moved_in,
    name_of,
    normalised_chain,
    one_step,
    paged,
    plainly,
    plans,
    resident_plans,
    sharded,
    stash_plans,
    tied_chain,
    trace_of,
    train,
    train_in_pieces,
    train_plainly,
)
from tests.random_plans import random_case
from tests.sim.closed_forms import closed_forms, moved
from traces.costs import Costs

CHAIN_PLANS = [*plans(CHAIN_PACKS, 1), *plans(CHAIN_PACKS, 2), *plans(CHAIN_PACKS, 3)[::4]]
GPT2_PLANS = [*plans(GPT2_PACKS, 1)[::2], *plans(GPT2_PACKS, 2)]
CHAIN_PLANS += stash_plans(CHAIN_STASHES) + resident_plans(CHAIN_PACKS)
CASES = [(chain, plan) for plan in CHAIN_PLANS] + [(gpt2, plan) for plan in GPT2_PLANS]


def has_closed_forms(plan: Plan) -> bool:
    if isinstance(plan, PagedPlan):
        return plan.residency is not Residency.LRU and plan.prefetch_depth == 0
    return plan.slots is None


def cases(of: list[tuple[Make, Plan]]) -> Any:
    return pytest.mark.parametrize(
        ("make", "plan"), [pytest.param(make, plan, id=f"{make.__name__}-{name_of(plan)}") for make, plan in of]
    )


class TestOneStep:
    @cases(CASES)
    def test_has_the_gradients_of_plain_training(self, make: Make, plan: Plan) -> None:
        assert differences(one_step(make, plan).trained, plainly(make)) == {}

    @cases(CASES)
    def test_moves_what_was_scheduled_and_simulated(self, make: Make, plan: Plan) -> None:
        ran = one_step(make, plan)
        simulated = simulate(ran.schedule, ran.trace, ran.machine)
        assert moved_in(ran.timeline) == moved(ran.schedule) == moved_in(simulated)

    @cases([case for case in CASES if case[0] is chain and has_closed_forms(case[1])])
    def test_moves_what_the_closed_forms_say(self, make: Make, plan: Plan) -> None:
        ran = one_step(make, plan)
        assert moved_in(ran.timeline) == closed_forms(plan, Costs(ran.trace))

    @cases(CASES)
    def test_stays_within_the_planned_memory(self, make: Make, plan: Plan) -> None:
        ran = one_step(make, plan)
        memory = ran.schedule.memory
        observed = observed_peak_bytes(ran.timeline)
        assert all(0 < peak <= planned for peak, planned in zip(observed, memory.gpu_peak_bytes, strict=True))
        assert memory.host_store_bytes <= observed_host_peak_bytes(ran.timeline) <= memory.host_peak_bytes


class TestSeveralSteps:
    FROZEN = partial(chain, frozen=True)
    BIASED = partial(tied_chain, bias=True)

    @pytest.mark.parametrize("make", [chain, FROZEN, tied_chain, gpt2], ids=["chain", "frozen", "tied", "gpt2"])
    @pytest.mark.parametrize("policy", Policy)
    @pytest.mark.parametrize("update", UpdateOn)
    def test_of_adam_are_those_of_plain_training(self, make: Make, policy: Policy, update: UpdateOn) -> None:
        workload = make()
        last = len(workload.layers()) - 1
        packs = ((0, 0), (1, 1)), ((0, 0), (1, 1), (2, last))
        if policy.is_paged:
            plan: Plan = paged(policy, 2, 3, residency=Residency.NEXT if update is UpdateOn.CPU else Residency.LRU)
        elif not policy.is_harmony:
            plan = sharded(2, 3, prefetch_depth=1 if update is UpdateOn.CPU else 0)
        else:
            plan = harmony(policy, 2, (4, 2), packs, update=update)
        ran = train(workload, plan, steps=1, warmup_steps=1, optimizer=adam, state_tensors=2)
        assert differences(ran.trained, plainly(make, 2, adam)) == {}

    @pytest.mark.parametrize(
        "make", [chain, FROZEN, tied_chain, BIASED, gpt2], ids=["chain", "frozen", "tied", "tied with biases", "gpt2"]
    )
    @pytest.mark.parametrize("number", range(12))
    def test_with_residents_are_those_of_plain_training(self, make: Make, number: int) -> None:
        workload = make()
        last = len(workload.layers()) - 1
        plan = resident_plans((((0, 0), (1, 1)), ((0, 0), (1, 1), (2, last))))[number]
        ran = train(workload, plan, steps=3, optimizer=adam, state_tensors=2)
        assert differences(ran.trained, plainly(make, 3, adam)) == {}

    def test_are_in_the_timeline_with_those_that_warm_up(self) -> None:
        ran = train(chain(), dp_swap(2, 4), steps=2, warmup_steps=1)
        info, frame = ran.timeline.info, ran.timeline.frame
        assert (info.source, info.steps, info.warmup_steps, len(ran.trained.losses)) == ("measured", 3, 1, 3)
        ids = list(range(len(ran.schedule.tasks)))
        assert [sorted(rows["task"]) for _, rows in frame.groupby("step")] == [ids] * 3
        assert (frame["end_ns"] >= frame["start_ns"]).all()

    def test_differ_by_the_seed_and_by_nothing_else(self) -> None:
        def losses(seed: int) -> tuple[float, ...]:
            workload, machine = normalised_chain(), made.machine(2)
            schedule = build(dp_swap(2, 2), trace_of(workload), machine)
            return run(schedule, workload, machine, steps=2, warmup_steps=0, optimizer=gradient_step, seed=seed).losses

        assert losses(0) == losses(0)
        assert losses(0)[1] != losses(1)[0]  # the same batch, other masks

    def test_leave_the_users_objects_and_generator_in_order(self) -> None:
        workload, machine = normalised_chain(), made.machine(2)
        schedule = build(dp_swap(2, 2), trace_of(workload), machine)
        before = dict(workload.model.named_parameters())
        state = torch.get_rng_state()
        threads = torch.get_num_threads()
        run(schedule, workload, machine, optimizer=gradient_step)
        assert all(parameter is before[name] for name, parameter in workload.model.named_parameters())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in before.values())
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads


NORMALISED_PACKS = ((0, 0), (1, 2)), ((0, 1), (2, 2), (3, 6))
CUT_SENSITIVE = [
    *(
        harmony(policy, gpus, (2, 2), NORMALISED_PACKS, update=update)
        for policy, gpus in ((Policy.HARMONY_DP, 1), (Policy.HARMONY_DP, 2), (Policy.HARMONY_PP, 2))
        for update in UpdateOn
    ),
    *stash_plans((((0, 0), (1, 3)), ((0, 0), (1, 1), (2, 2), (3, 3), (4, 6))), u=2),
    harmony(Policy.HARMONY_PP, 3, (2, 2), (((0, 3),), ((0, 0), (1, 1), (2, 3), (4, 6)))),
    harmony(Policy.HARMONY_PP, 2, (3, 3), ((), ((0, 6),))),
    *(dp_swap(2, 2, residency=residency) for residency in Residency),
    dp_swap(1, 3),
    paged(Policy.GPIPE_SWAP, 2, 2, residency=Residency.NONE),
    paged(Policy.ONE_F_ONE_B_SWAP, 3, 3),
]


@pytest.mark.parametrize("plan", CUT_SENSITIVE, ids=name_of)
def test_batch_norm_and_dropout_are_those_of_the_same_microbatches(plan: Plan) -> None:
    expected = train_in_pieces(normalised_chain(), cut_of(plan), steps=2)
    assert differences(train(normalised_chain(), plan, steps=2).trained, expected) == {}


@pytest.mark.parametrize(
    "plan",
    [
        harmony(Policy.HARMONY_DP, 1, (3, 3), GPT2_PACKS),
        harmony(Policy.HARMONY_DP, 3, (3, 3), GPT2_PACKS, update=UpdateOn.GPU),  # shares of 3, 3 and 2 samples
        harmony(Policy.HARMONY_PP, 2, (3, 3), GPT2_PACKS),
        harmony(Policy.HARMONY_PP, 3, (3, 3), (((0, 2),), ((0, 0), (1, 1), (2, 2), (3, 6)))),
        dp_swap(1, 3),
        dp_swap(3, 3),
        paged(Policy.GPIPE_SWAP, 3, 3, residency=Residency.NEXT),
        paged(Policy.ONE_F_ONE_B_SWAP, 2, 3),
    ],
    ids=name_of,
)
def test_with_dropout_only_the_cut_counts(plan: Plan) -> None:
    expected = train_in_pieces(gpt2(dropout=0.2), [[(0, 3), (3, 6), (6, 8)]])
    assert differences(train(gpt2(dropout=0.2), plan).trained, expected) == {}


class Dawdler(EmulatedQueue):
    """Starts and ends tasks late, at random."""

    def mark(self) -> int:
        time.sleep(random.random() * 5e-4)
        return super().mark()


class HostileDevices(EmulatedDevices):
    """Lanes dawdle, and new memory is full of NaN."""

    def queue(self, lane: LaneKey) -> EmulatedQueue:
        return Dawdler(self, lane)

    def gpu_bytes(self, gpu: int, size: int) -> Tensor:
        return super().gpu_bytes(gpu, size).fill_(0xFF)

    def host_bytes(self, size: int) -> Tensor:
        return super().host_bytes(size).fill_(0xFF)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes dawdle, and what is freed is spoilt."""
    free = Places.free

    def spoil_and_free(places: Places, number: int) -> int:
        if places.buffers[number].kind is not TensorKind.WORKSPACE:
            places.block(number).bytes.fill_(0xFF)
        return free(places, number)

    monkeypatch.setattr(Places, "free", spoil_and_free)
    monkeypatch.setattr("executor.running.opening.open_devices", lambda kind, machine: HostileDevices(machine))


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("seed", range(16))
def test_any_plan_trains_as_plain_pytorch_does_in_a_hostile_place(seed: int) -> None:
    """Whatever the timing, nothing is read before it is written or after it was freed."""
    workload = [chain, partial(chain, frozen=True), gpt2, tied_chain][seed % 4]()
    plan = random_case(seed, layers=len(workload.layers())).plan
    if isinstance(plan, PagedPlan):
        plan = msgspec.structs.replace(plan, recompute=True)
    expected = train_plainly(workload, minibatch=plan.minibatch)
    assert differences(train(workload, plan).trained, expected) == {}


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("seed", range(8))
def test_steps_that_overlap_train_as_plain_pytorch_does_in_a_hostile_place(seed: int) -> None:
    workload = [chain, partial(chain, frozen=True), tied_chain, gpt2][seed % 4]()
    layers = len(workload.layers())
    drawn = (random_case(100 * seed + more, layers=layers).plan for more in range(100))
    plan = next(plan for plan in drawn if isinstance(plan, HarmonyPlan))
    plan = msgspec.structs.replace(plan, overlap_steps=True, resident_weights=(), resident_state=())
    expected = train_plainly(workload, 4, minibatch=plan.minibatch)
    assert differences(train(workload, plan, steps=3).trained, expected) == {}


def test_of_steps_that_overlap_one_runs_alone_before() -> None:
    plan = harmony(Policy.HARMONY_PP, 2, (2, 2), CHAIN_PACKS, overlap_steps=True)
    ran = train(chain(), plan, steps=3, warmup_steps=1)
    info = ran.timeline.info
    assert (info.steps, info.warmup_steps, info.overlapping, info.alone) == (5, 1, 3, range(1, 2))
    assert len(ran.trained.losses) == 5
    assert differences(ran.trained, plainly(chain, 5)) == {}
    found = compare(simulate(ran.schedule, ran.trace, ran.machine, steps=2), ran.timeline)
    assert found.period_s is not None
    assert found.differing_bytes() == []
    ends = ran.timeline.frame.groupby("step")["end_ns"].max().to_list()
    assert ran.timeline.period_ns == round((ends[4] - ends[2]) / 2)
    only = train(chain(), plan, steps=1, warmup_steps=1).timeline
    assert (only.info.steps, only.period_ns) == (2, None)


# ------------------------------------------------------------------------------------------------------- refusals

DP = harmony(Policy.HARMONY_DP, 2, (2, 2), CHAIN_PACKS)
PP = harmony(Policy.HARMONY_PP, 2, (2, 2), CHAIN_PACKS)
EACH_POLICY = pytest.mark.parametrize("plan", [DP, PP, dp_swap(2, 2)], ids=name_of)


def schedule_of(plan: Plan, workload: Workload | None = None) -> Schedule:
    return build(plan, trace_of(workload or chain()), made.machine(plan.gpus))


def run_chain(schedule: Schedule, workload: Workload | None = None, machine: Machine | None = None) -> RunResult:
    return run(
        schedule, workload or chain(), machine or made.machine(schedule.plan.gpus), steps=1, optimizer=gradient_step
    )


def with_half_the_memory(schedule: Schedule) -> Schedule:
    memory = schedule.memory
    halved = msgspec.structs.replace(memory, gpu_cap_bytes=tuple(peak // 2 for peak in memory.gpu_peak_bytes))
    return msgspec.structs.replace(schedule, memory=halved)


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


class TestMemory:
    @pytest.mark.parametrize("plan", [DP, PP], ids=name_of)
    def test_past_the_cap_is_refused(self, plan: Plan) -> None:
        """Where each buffer has its place, before anything runs."""
        with pytest.raises(OutOfArena, match=r"has no room for buffer \d+ .* it would end at \d+; the cap is"):
            run_chain(with_half_the_memory(schedule_of(plan)))

    def test_past_the_cap_ends_a_run(self) -> None:
        """Where buffers are only counted, when it happens."""
        with pytest.raises(TaskFailed, match=r"\(task \d+\) failed: .* no room for .* are held; the cap is") as failed:
            run_chain(with_half_the_memory(schedule_of(dp_swap(2, 2))))
        assert isinstance(failed.value.__cause__, OutOfArena)
        assert lanes_alive() == []

    @EACH_POLICY
    def test_beyond_a_reserved_workspace_is_an_error(self, plan: Plan) -> None:
        trace = trace_of(chain(), workspace_bytes=16)
        with pytest.raises(TaskFailed, match=r"compute \(task \d+\) failed: layers .* took .* reserves") as failed:
            run_chain(build(plan, trace, made.machine(2)))
        assert isinstance(failed.value.__cause__, WorkspaceOverrun)

    def test_that_a_gpu_does_not_have_is_refused(self) -> None:
        schedule = schedule_of(DP)
        peak = max(schedule.memory.gpu_peak_bytes)
        with pytest.raises(DoesNotFit) as refused:
            run_chain(schedule, machine=made.machine(2, memory_bytes=peak - 1))
        assert (refused.value.needed, refused.value.gpu) == (peak, schedule.memory.gpu_peak_bytes.index(peak))
        run_chain(schedule, machine=made.machine(2, memory_bytes=peak))

    def test_that_the_host_does_not_have_is_refused(self) -> None:
        schedule, machine = schedule_of(DP), made.machine(2)
        needed = schedule.memory.host_peak_bytes
        host = msgspec.structs.replace(machine.host, memory_bytes=needed - 1)
        with pytest.raises(DoesNotFit) as refused:
            run_chain(schedule, machine=msgspec.structs.replace(machine, host=host))
        assert (refused.value.needed, refused.value.gpu) == (needed, None)


class TestAnotherModel:
    @EACH_POLICY
    def test_with_more_layers(self, plan: Plan) -> None:
        workload = chain()
        workload.model.append(nn.Tanh())
        with pytest.raises(DifferentModel, match=r"made with 8 layers .* this model has 9"):
            run_chain(schedule_of(plan), workload)

    @EACH_POLICY
    def test_in_another_dtype(self, plan: Plan) -> None:
        workload = chain()
        workload.model.float()
        with pytest.raises(DifferentModel, match=r"moves \d+ B of (weight|buffer) for .*, this model has \d+ B"):
            run_chain(schedule_of(plan), workload)

    def test_with_another_optimizer(self) -> None:
        schedule = schedule_of(dp_swap(2, 2))
        with pytest.raises(DifferentModel, match=r"optimizer_state .* Adam keeps \d+ B"):
            run(schedule, chain(), made.machine(2), optimizer=adam)

    @EACH_POLICY
    def test_with_other_activations(self, plan: Plan) -> None:
        workload = chain()
        workload.model[2] = nn.Sequential(nn.Tanh(), Twice())
        with pytest.raises(TaskFailed, match=r"layer 2 \(2\) returned \d+ B .* made for \d+ B") as failed:
            run_chain(schedule_of(plan), workload)
        assert isinstance(failed.value.__cause__, DifferentModel)

    @EACH_POLICY
    def test_with_other_batches(self, plan: Plan) -> None:
        def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
            inputs, labels = made.vectors()(samples, seed)
            return inputs.float(), labels

        with pytest.raises(DifferentModel, match=r"the inputs take 24 B a sample .* was made for 48 B"):
            run_chain(schedule_of(plan), replace(chain(), batch=batch))

    def test_on_fewer_gpus(self) -> None:
        with pytest.raises(DeviceError, match="for 2 GPUs, there are 1"):
            run_chain(schedule_of(DP), machine=made.machine(1))


class Twice(nn.Module):
    """Doubles the features."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=1)


# --------------------------------------------------------------------------------------------------------- faults


class BrokenQueue:
    """Fails at whatever it is asked to do."""

    def __init__(self, queue: Queue) -> None:
        self.wait, self.mark = queue.wait, queue.mark
        self.compute = self.swap = self.send = self.all_reduce = self._fail

    def _fail(self, *args: object, **options: object) -> NoReturn:
        raise OSError("broken")


def break_lane(lane: LaneKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs have emulated GPUs of which one lane is broken."""

    class Devices(EmulatedDevices):
        def queue(self, key: LaneKey) -> Any:
            queue = super().queue(key)
            return BrokenQueue(queue) if key == lane else queue

    monkeypatch.setattr("executor.running.opening.open_devices", lambda kind, machine: Devices(machine))


@pytest.mark.parametrize(
    ("lane", "plan"),
    [
        ((1, Lane.COMPUTE), DP),
        ((1, Lane.SWAP_IN), DP),
        ((0, Lane.SWAP_OUT), DP),
        ((None, Lane.COLLECTIVE), DP),
        ((None, Lane.UPDATE), DP),
        ((0, Lane.P2P_OUT), PP),
        ((0, Lane.COMPUTE), dp_swap(2, 2)),
    ],
    ids=lambda value: lane_name(value) if isinstance(value, tuple) else value.policy.value,
)
def test_a_fault_in_any_lane_ends_the_run_and_names_the_task(
    lane: LaneKey, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedule_of(plan)
    break_lane(lane, monkeypatch)
    with pytest.raises(TaskFailed) as failed:
        run_chain(schedule)
    first = schedule.tasks[schedule.lanes[lane][0]]
    assert str(failed.value) == f"step 0, lane {lane_name(lane)}: {first} failed: OSError: broken"
    assert lanes_alive() == []


def test_a_fault_stops_copies_that_would_take_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = made.machine(2)
    assert machine.emulation is not None
    slow = msgspec.structs.replace(machine.emulation, links={"root": 0.1})  # bytes a second
    break_lane((1, Lane.SWAP_IN), monkeypatch)
    with pytest.raises(TaskFailed, match="OSError: broken"):
        run_chain(schedule_of(DP), machine=msgspec.structs.replace(machine, emulation=slow))
    assert lanes_alive() == []


class Fails(torch.autograd.Function):
    """Identity; backward fails."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


class FailsBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Fails.apply(x)
        return y


class FailsForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("in forward")


class Interrupts(nn.Module):
    """As Ctrl-C does: the signal arrives in the main thread."""

    def forward(self, x: Tensor) -> Tensor:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return x.tanh()


@EACH_POLICY
@pytest.mark.parametrize(("layer", "task"), [(FailsForward, "forward"), (FailsBackward, "backward")])
def test_a_fault_in_a_layer_names_the_task(layer: type[nn.Module], task: str, plan: Plan) -> None:
    workload, schedule = chain(), schedule_of(plan)
    workload.model[2] = layer()
    with pytest.raises(TaskFailed, match=rf": {task} .*\(task \d+\) failed: ZeroDivisionError: in {task}") as failed:
        run_chain(schedule, workload)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert lanes_alive() == []


@EACH_POLICY
def test_an_interrupt_ends_the_run_at_once(plan: Plan) -> None:
    workload, schedule = chain(), schedule_of(plan)
    workload.model[2] = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        run(schedule, workload, made.machine(2), optimizer=gradient_step, device=DeviceKind.EMULATED)
    assert lanes_alive() == []
