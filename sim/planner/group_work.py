"""What the groups of a Harmony plan have to do at least: time and copies, as sums over each group's microbatches.

Every copy counts as if it were alone on the machine, and everything is rounded towards less. Plans of one search have
most of their groups in common: what does not depend on the rest of a plan is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from traces.costs import Costs
from traces.schema import Phase

from ..builders.order import is_data_parallel
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, Reduce, UpdateOn, shares
from .ways import Ways

Size = Callable[[int], int]
"""Bytes of a tensor by microbatch size."""


@dataclass(slots=True)
class Work:
    """A group. Before its first microbatch starts, ``in_first_ns`` of the GPU's swap-in lane are over, before its last
    one ``in_ns``; ``out_ns`` leave from the end of its first microbatch on.

    A *hop* lies between the end of a microbatch in the group before and the start of the same samples here: of the
    first samples, and of the last. Bytes come in from the host, go out to it, and cross from GPU ``source`` (None:
    nothing does).
    """

    gpu: int
    compute_ns: float
    first_ns: float
    last_ns: float
    in_first_ns: float
    in_ns: float
    in_bytes: int
    out_ns: float = 0.0
    out_bytes: int = 0
    hop_first_ns: float = 0.0
    hop_last_ns: float = 0.0
    source: int | None = None
    cross_bytes: int = 0


@dataclass(slots=True)
class Job:
    """A pack's groups: one in a pipeline, one on each GPU in data parallel.

    When all of them have ended, GPU ``updater`` (None: the host) updates for ``update_ns``; ``before_update_ns`` pass
    before that (state comes in for ``state_in_ns``), ``after_update_ns`` after it. ``reduced_bytes`` are all-reduced.
    """

    works: list[Work]
    updater: int | None = None
    before_update_ns: float = 0.0
    state_in_ns: float = 0.0
    update_ns: float = 0.0
    after_update_ns: float = 0.0
    reduced_bytes: int = 0


class Batches(NamedTuple):
    """The microbatches of a group: ``number`` of them, all but the last of size ``first``."""

    number: int
    first: int
    last: int

    @classmethod
    def of(cls, samples: int, u: int) -> Batches:
        """So many samples in pieces of ``u``; the last may be smaller."""
        number = -(-samples // u)
        return cls(number, min(u, samples), samples - (number - 1) * u)

    def total(self, figure: Callable[[int], float]) -> float:
        """Sum of a figure over the microbatches."""
        return (self.number - 1) * figure(self.first) + figure(self.last)

    def total_bytes(self, size: Size) -> int:
        """Sum of bytes over the microbatches."""
        return (self.number - 1) * size(self.first) + size(self.last)


class _Place(NamedTuple):
    """All that the work of a pack's groups depends on, but for what leaves a forward pack.

    ``gpu`` None: on all GPUs. ``through_host``: what comes from the pack before goes that way for certain.
    """

    backward: bool
    fused: bool
    pack: Pack
    u: int
    gpu: int | None
    owner: int
    through_host: bool
    u_before: int | None
    gpu_before: int | None


class JobMaker:
    """Makes the jobs of the plans of one trace on one machine."""

    def __init__(self, costs: Costs, machine: Machine, ways: Ways) -> None:
        self._costs, self._machine, self._ways = costs, machine, ways
        self._made: dict[tuple[object, ...], _Maker] = {}

    def jobs(self, plan: HarmonyPlan) -> list[Job]:
        """The jobs of a plan: forward packs first to last, then backward packs last to first.

        Raises TraceError where the trace lacks an update's time or does not cover a microbatch.
        """
        key = (plan.policy, plan.minibatch, plan.update, plan.reduce, plan.slots is None)
        maker = self._made.get(key)
        if maker is None:
            maker = self._made[key] = _Maker(plan, self._costs, self._machine, self._ways)
        return maker.jobs(plan)


class _Maker:
    """Makes jobs of plans that have policy, minibatch, update, reduction and use of slots in common."""

    def __init__(self, plan: HarmonyPlan, costs: Costs, machine: Machine, ways: Ways) -> None:
        self._costs, self._machine, self._ways = costs, machine, ways
        self._parallel = is_data_parallel(plan)
        self._update, self._reduce = plan.update, plan.reduce
        self._never_spills = plan.slots is None
        if self._parallel:
            self._samples = [stop - start for start, stop in shares(plan.minibatch, plan.gpus)]
        else:
            self._samples = [plan.minibatch] * plan.gpus
        self._jobs: dict[_Place, Job] = {}
        self._leaving: dict[tuple[int, int, int], tuple[float, int]] = {}

    def jobs(self, plan: HarmonyPlan) -> list[Job]:
        """As :meth:`JobMaker.jobs`."""
        stashed = frozenset(first for first, _ in plan.packs_bwd[1:-1])
        fused_first = plan.packs_bwd[-1][0]
        jobs = []
        for place in self._places(plan):
            job = self._jobs.get(place)
            if job is None:
                job = self._jobs[place] = self._job(place)
            if not place.backward:
                job = self._with_outputs(job, place, stashed, place.pack[1] + 1 == fused_first, plan)
            jobs.append(job)
        return jobs

    def _places(self, plan: HarmonyPlan) -> Iterator[_Place]:
        forward = [(False, index, pack) for index, pack in enumerate(plan.packs_fwd)]
        backward = [(True, index, pack) for index, pack in reversed(list(enumerate(plan.packs_bwd)))]
        u_before = gpu_before = None
        for position, (is_backward, index, pack) in enumerate(forward + backward):
            gpu = None if self._parallel else position % plan.gpus
            u = plan.u_bwd if is_backward else plan.u_fwd
            fused = is_backward and index == len(plan.packs_bwd) - 1
            recut = fused and plan.u_fwd != plan.u_bwd
            owner = index % plan.gpus if gpu is None else gpu
            yield _Place(is_backward, fused, pack, u, gpu, owner, self._parallel or recut, u_before, gpu_before)
            u_before, gpu_before = u, gpu

    def _job(self, place: _Place) -> Job:
        gpus = range(len(self._samples)) if place.gpu is None else (place.gpu,)
        job = Job([self._work(place, gpu) for gpu in gpus])
        if place.backward:
            self._add_update(job, place)
        return job

    def _work(self, place: _Place, gpu: int) -> Work:
        costs, into = self._costs, self._ways.into[gpu]
        first, last = place.pack
        batches = Batches.of(self._samples[gpu], place.u)
        state = costs.weight_bytes(first, last), costs.buffer_bytes(first, last)
        state_ns = sum(map(into.ns, state))
        boundary = self._boundary(place)
        is_first = place.u_before is None
        come = self._home_inputs(place)
        if is_first or place.through_host:
            come = [*come, boundary]
        speed = self._machine.gpus[gpu].speed

        def compute_ns(u: int) -> int:
            duration = costs.forward_ns(first, last, u)
            return math.floor((duration + costs.backward_ns(first, last, u) if place.backward else duration) / speed)

        work = Work(
            gpu=gpu,
            compute_ns=batches.total(compute_ns),
            first_ns=compute_ns(batches.first),
            last_ns=compute_ns(batches.last),
            in_first_ns=state_ns + sum(into.ns(size(batches.first)) for size in come),
            in_ns=state_ns + batches.total(lambda u: sum(into.ns(size(u)) for size in come)),
            in_bytes=sum(state) + sum(map(batches.total_bytes, come)),
        )
        if self._parallel and place.backward and first > 0:
            work.out_ns, work.out_bytes = self._leave(gpu, batches, lambda u: costs.input_gradient_bytes(first, u))
        if not is_first:
            self._add_hop(work, place, boundary, batches)
        return work

    def _boundary(self, place: _Place) -> Size:
        """What a group takes from the group before: x(first), or in backward (but for the fused pack) g(last + 1)."""
        first, last = place.pack
        if place.backward and not place.fused:
            return lambda u: self._costs.input_gradient_bytes(last + 1, u)
        return lambda u: self._costs.input_bytes(first, u)

    def _home_inputs(self, place: _Place) -> list[Size]:
        """What a group takes from the host besides: labels, or its stash (layer 0: data)."""
        if not place.backward:
            return []
        return [self._costs.label_bytes if place.fused else lambda u: self._costs.input_bytes(place.pack[0], u)]

    def _leave(self, gpu: int, batches: Batches, size: Size) -> tuple[float, int]:
        out = self._ways.out[gpu]
        return batches.total(lambda u: out.ns(size(u))), batches.total_bytes(size)

    def _with_outputs(self, job: Job, place: _Place, stashed: frozenset[int], is_last: bool, plan: HarmonyPlan) -> Job:
        """A forward job with what leaves it for the host for certain: boundary tensors in data parallel, stash."""
        first, last = place.pack
        by_host = self._parallel or (is_last and plan.u_fwd != plan.u_bwd)
        # A boundary that a receiver has no slot for goes through the host, and is a stash there already.
        sent_and_stashed = not by_host and self._never_spills
        layers = [layer for layer in range(first + 1, last + 1 + sent_and_stashed) if layer in stashed]
        layers += [last + 1] if by_host else []
        if not layers:
            return job
        works = []
        for work in job.works:
            left = [self._leaving_input(layer, place.u, work.gpu) for layer in layers]
            works.append(replace(work, out_ns=sum(ns for ns, _ in left), out_bytes=sum(size for _, size in left)))
        return replace(job, works=works)

    def _leaving_input(self, layer: int, u: int, gpu: int) -> tuple[float, int]:
        key = layer, u, gpu
        if key not in self._leaving:
            batches = Batches.of(self._samples[gpu], u)
            self._leaving[key] = self._leave(gpu, batches, lambda v: self._costs.input_bytes(layer, v))
        return self._leaving[key]

    def _add_hop(self, work: Work, place: _Place, boundary: Size, batches: Batches) -> None:
        """Of two ways that the tensor may go, the shorter one."""
        source = work.gpu if place.gpu_before is None else place.gpu_before
        into, out = self._ways.into[work.gpu], self._ways.out[source]
        made = Batches.of(self._samples[source], place.u_before or place.u)
        pairs = ((made.first, batches.first), (made.last, batches.last))
        hops = [out.ns(boundary(u_out)) + into.ns(boundary(u_in)) for u_out, u_in in pairs]
        if not place.through_host:
            way = self._ways.between[source, work.gpu]
            straight = [way.ns(boundary(u_in)) for _, u_in in pairs]
            hops = straight if self._never_spills else list(map(min, hops, straight))
            work.source, work.cross_bytes = source, batches.total_bytes(boundary)
        work.hop_first_ns, work.hop_last_ns = hops

    def _add_update(self, job: Job, place: _Place) -> None:
        costs, pack = self._costs, place.pack
        gradient = costs.gradient_bytes(*pack)
        owner = next(work for work in job.works if work.gpu == place.owner)
        into, out = self._ways.into[owner.gpu], self._ways.out[owner.gpu]
        by_host = len(job.works) > 1 and self._reduce is Reduce.HOST
        if len(job.works) > 1 and not by_host and gradient:
            job.before_update_ns, job.reduced_bytes = self._ways.ring_ns(gradient), gradient
        if by_host or self._update is UpdateOn.CPU:
            writers = job.works if by_host else [owner]
            job.before_update_ns += min(self._ways.out[work.gpu].ns(gradient) for work in writers)
            for work in writers:
                work.out_bytes += gradient
        owned = [layer for layer in range(pack[0], pack[1] + 1) if costs.updates(layer)]
        if self._update is UpdateOn.CPU:
            job.update_ns = math.floor(costs.update_ns(*pack, Phase.UPDATE_CPU) / self._machine.host.speed)
        elif owned:
            state, weight = costs.optimizer_state_bytes(*pack), sum(costs.weight_bytes(at, at) for at in owned)
            job.updater = owner.gpu
            job.state_in_ns = into.ns(state)
            job.update_ns = math.floor(costs.update_ns(*pack, Phase.UPDATE_GPU) / self._machine.gpus[owner.gpu].speed)
            job.after_update_ns = out.ns(weight)
            owner.in_bytes += state
            owner.out_bytes += state + weight
