"""What the groups of a Harmony plan have to do at least: time and copies, as sums over each group's microbatches.

Every copy counts as if it were alone on the machine, and everything is rounded towards less. Plans of one search have
most of their groups in common: what does not depend on the rest of a plan is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from traces.costs import Costs
from traces.schema import Phase

from ..builders.needs import runs_where
from ..builders.order import is_data_parallel, split_packs
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, Reduce, StashPlace, UpdateOn, UpdateWhen, shares
from ..schedule import TensorKind
from ..shards import Shards
from ..units import NS_PER_S
from .jobs import Batches, Job, Size, Work
from .residence import Residence, Residences
from .ways import Ways


class _Place(NamedTuple):
    """All that the work of a pack's groups depends on, but for what leaves a forward pack.

    ``gpu`` None: on all GPUs. ``through_host``: what comes from the pack before goes that way for certain. ``stash``:
    where its stash waits, if it has one. ``again`` are repeated for it, from the stash that waits at ``again_from``
    (None: from the data).
    """

    backward: bool
    fused: bool
    pack: Pack
    u: int
    gpu: int | None
    owner: int
    through_host: bool
    stash: StashPlace | None
    split: int
    again: tuple[Pack, ...]
    again_from: StashPlace | None
    residence: Residence
    u_before: int | None
    gpu_before: int | None


class JobMaker:
    """Makes the jobs of the plans of one trace on one machine."""

    def __init__(self, costs: Costs, machine: Machine, ways: Ways) -> None:
        self._costs, self._machine, self._ways = costs, machine, ways
        self._made: dict[tuple[object, ...], _Maker] = {}

    def jobs(self, plan: HarmonyPlan) -> Iterator[Job]:
        """The jobs of a plan, as they are asked for: forward packs first to last, then backward packs last to first.

        Raises TraceError where the trace lacks an update's time or does not cover a microbatch.
        """
        key = (plan.policy, plan.minibatch, plan.update, plan.update_when, plan.reduce, plan.slots is None)
        maker = self._made.get(key)
        if maker is None:
            maker = self._made[key] = _Maker(plan, self._costs, self._machine, self._ways)
        return maker.jobs(plan)

    def norm_ns(self, plan: HarmonyPlan) -> float | None:
        """What the norm takes before the updates at the end of the step; None if packs are updated just in time."""
        if plan.update_when is UpdateWhen.JIT:
            return None
        return math.floor(norm_ns(self._costs, self._machine))


def norm_ns(costs: Costs, machine: Machine) -> float:
    """What the norm of the whole gradient takes in the host, alone."""
    return costs.gradient_bytes(0, costs.layer_count - 1) / machine.host.dram_bandwidth * NS_PER_S


class _Maker:
    """Makes jobs of plans that have policy, minibatch, update and its time, reduction and use of slots in common."""

    def __init__(self, plan: HarmonyPlan, costs: Costs, machine: Machine, ways: Ways) -> None:
        self._costs, self._machine, self._ways = costs, machine, ways
        self._parallel = is_data_parallel(plan)
        self._update, self._reduce = plan.update, plan.reduce
        self._at_end = plan.update_when is UpdateWhen.END
        self._shards = Shards(costs, plan.gpus)
        self._never_spills = plan.slots is None
        if self._parallel:
            self._samples = [stop - start for start, stop in shares(plan.minibatch, plan.gpus)]
        else:
            self._samples = [plan.minibatch] * plan.gpus
        self._residences = Residences(costs)
        self._jobs: dict[tuple[_Place, tuple[int, ...]], Job] = {}

    def jobs(self, plan: HarmonyPlan) -> Iterator[Job]:
        """As :meth:`JobMaker.jobs`."""
        swapped = [index for index, place in plan.stash_places.items() if place is StashPlace.SWAP]
        stashed = frozenset(plan.packs_bwd[index][0] for index in swapped)
        fused_first = plan.packs_bwd[-1][0]
        for place in self._places(plan):
            leaving: tuple[int, ...] = ()
            if not place.backward:
                recut = place.pack[1] + 1 == fused_first and plan.u_fwd != plan.u_bwd
                leaving = self._leaving(place.pack, stashed, by_host=self._parallel or recut)
            key = place, leaving
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = self._job(place, leaving)
            yield job

    def _leaving(self, pack: Pack, stashed: frozenset[int], *, by_host: bool) -> tuple[int, ...]:
        """Layers whose input a forward pack sends to the host for certain: as stash, or to the next pack ``by_host``.

        A boundary that a receiver has no slot for goes through the host, and is a stash there already.
        """
        sent_and_stashed = not by_host and self._never_spills
        first, last = pack
        layers = [layer for layer in range(first + 1, last + 1 + sent_and_stashed) if layer in stashed]
        return (*layers, last + 1) if by_host else tuple(layers)

    def _places(self, plan: HarmonyPlan) -> Iterator[_Place]:
        forward = [(False, index, pack) for index, pack in enumerate(plan.packs_fwd)]
        backward = [(True, index, pack) for index, pack in reversed(list(enumerate(plan.packs_bwd)))]
        split = split_packs(plan, self._costs)
        u_before = gpu_before = None
        residents = self._residences.residents(plan)
        for position, (is_backward, index, pack) in enumerate(forward + backward):
            gpu = None if self._parallel else plan.gpu_of_turn(position)
            u = plan.u_bwd if is_backward else plan.u_fwd
            fused = is_backward and index == len(plan.packs_bwd) - 1
            recut = fused and plan.u_fwd != plan.u_bwd
            owner = plan.gpu_of_turn(index) if gpu is None else gpu
            through_host = self._parallel or recut
            apart = plan.split_backward if is_backward and pack in split else 0
            again = plan.packs_again(index) if is_backward else range(0)
            again_packs = tuple(plan.packs_bwd[each] for each in again)
            yield _Place(
                backward=is_backward,
                fused=fused,
                pack=pack,
                u=u,
                gpu=gpu,
                owner=owner,
                through_host=through_host,
                stash=plan.stash_places.get(index) if is_backward else None,
                split=apart,
                again=again_packs,
                again_from=plan.stash_places.get(again.start) if again else None,
                residence=self._residences.of(
                    residents, owner, pack, again_packs, state_stays=is_backward and index in plan.resident_state
                ),
                u_before=u_before,
                gpu_before=gpu_before,
            )
            u_before, gpu_before = u, gpu

    def _job(self, place: _Place, leaving: tuple[int, ...]) -> Job:
        gpus = range(len(self._samples)) if place.gpu is None else (place.gpu,)
        job = Job([self._work(place, gpu, leaving) for gpu in gpus])
        if place.backward:
            self._add_update(job, place)
        return job

    def _work(self, place: _Place, gpu: int, leaving: tuple[int, ...]) -> Work:
        costs, into = self._costs, self._ways.into[gpu]
        first, last = place.pack
        batches = Batches.of(self._samples[gpu], place.u)
        state = place.residence.weights_in, costs.buffer_bytes(first, last)
        state_ns = sum(map(into.ns, state))
        boundary = self._boundary(place)
        is_first = place.u_before is None
        come = self._other_inputs(place) if place.stash in (None, StashPlace.SWAP) else []
        if is_first or place.through_host:
            come = [*come, boundary]
        speed = self._machine.gpus[gpu].speed

        def hand_on_ns(u: int) -> int:
            duration = costs.forward_ns(first, last, u)
            if place.backward:
                backward_ns = costs.backward_input_ns if place.split else costs.backward_ns
                duration += backward_ns(first, last, u)
            return math.floor(duration / speed)

        def late_ns(u: int) -> int:
            return math.floor(costs.backward_weight_ns(first, last, u) / speed) if place.split else 0

        work = Work(
            gpu=gpu,
            compute_ns=batches.total(hand_on_ns) + batches.total(late_ns),
            first_ns=hand_on_ns(batches.first),
            last_ns=hand_on_ns(batches.last),
            late_ns=batches._replace(number=min(batches.number, max(1, place.split))).total(late_ns),
            late_least_ns=late_ns(batches.last),
            state_ns=state_ns,
            in_first_ns=state_ns + sum(into.ns(size(batches.first)) for size in come),
            in_ns=state_ns + batches.total(lambda u: sum(into.ns(size(u)) for size in come)),
            in_bytes=sum(state) + sum(map(batches.total_bytes, come)),
            state_bytes=sum(state),
            held_bytes=place.residence.held + sum(state) + self._working_bytes(place, batches.first),
        )
        outs: list[Size] = [partial(costs.input_bytes, layer) for layer in leaving]
        if self._parallel and place.backward and first > 0:
            outs.append(partial(costs.input_gradient_bytes, first))
        out = self._ways.out[gpu]
        work.out_ns = batches.total(lambda u: sum(out.ns(size(u)) for size in outs))
        work.out_bytes = sum(map(batches.total_bytes, outs))
        if not is_first:
            self._add_hop(work, place, boundary, batches)
        if place.again:
            self._add_again(work, place, batches)
        return work

    def _add_again(self, work: Work, place: _Place, batches: Batches) -> None:
        """What it takes to repeat the forwards of some packs."""
        costs, into, speed = self._costs, self._ways.into[work.gpu], self._machine.gpus[work.gpu].speed
        state = [place.residence.again_in, *(costs.buffer_bytes(*pack) for pack in place.again)]
        source = partial(costs.input_bytes, place.again[0][0])
        come = [] if place.again_from is StashPlace.KEEP else [source]

        def compute_ns(u: int) -> int:
            return sum(math.floor(costs.forward_ns(*pack, u) / speed) for pack in place.again)

        in_ns = sum(map(into.ns, state)) + batches.total(lambda u: sum(into.ns(size(u)) for size in come))
        work.again_ns = batches.total(compute_ns)
        work.in_first_ns += in_ns
        work.in_ns += in_ns
        work.in_bytes += sum(state) + sum(map(batches.total_bytes, come))

    def _working_bytes(self, place: _Place, u: int) -> int:
        """What one microbatch needs besides weights and buffers."""
        costs, (first, last) = self._costs, place.pack
        if not place.backward:
            outside = costs.input_bytes(first, u) + costs.output_bytes(last, u)
            return outside + costs.forward_workspace_bytes(first, last, u)
        outside = sum(size(u) for size in (self._boundary(place), *self._other_inputs(place)))
        outside += costs.input_gradient_bytes(first, u) if first else 0
        return outside + costs.gradient_bytes(first, last) + costs.backward_workspace_bytes(first, last, u)

    def _boundary(self, place: _Place) -> Size:
        """What a group takes from the group before: x(first), or in backward (but for the fused pack) g(last + 1)."""
        first, last = place.pack
        if place.backward and not place.fused:
            return lambda u: self._costs.input_gradient_bytes(last + 1, u)
        return lambda u: self._costs.input_bytes(first, u)

    def _other_inputs(self, place: _Place) -> list[Size]:
        """What a group takes besides: labels, or its stash (layer 0: data)."""
        if not place.backward:
            return []
        return [self._costs.label_bytes if place.fused else lambda u: self._costs.input_bytes(place.pack[0], u)]

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
        """The reduction, and the update on the owner, on all GPUs by shard, or in the host. At the end of the step,
        what an update on a GPU takes comes in once more."""
        costs, pack, works = self._costs, place.pack, job.works
        by_host, scattered = (len(works) > 1 and self._reduce is each for each in (Reduce.HOST, Reduce.SCATTER))
        takers = works if scattered else [work for work in works if work.gpu == place.owner]

        def taken(kind: TensorKind, run: Pack, work: Work) -> int:
            return self._shards.bytes(kind, run, work.gpu if scattered else None)

        if len(works) > 1 and not by_host:
            job.sent_bytes = (1 if scattered else 2) * (len(works) - 1) * costs.gradient_bytes(*pack)
            job.before_update_ns = self._ways.ring_ns(job.sent_bytes)
        if by_host or self._at_end or self._update is UpdateOn.CPU:
            writers = works if by_host else takers
            sizes = [taken(TensorKind.GRADIENT, pack, work) for work in writers]
            times = [self._ways.out[work.gpu].ns(size) for work, size in zip(writers, sizes, strict=True)]
            # Shards all leave after the reduction; who of those that the host adds leaves last is not known.
            job.before_update_ns += max(times) if scattered else min(times)
            for work, size in zip(writers, sizes, strict=True):
                work.out_bytes += size
        updated = list(runs_where(pack, costs.updates))
        if self._update is UpdateOn.CPU:
            job.update_ns = math.floor(costs.update_ns(*pack, Phase.UPDATE_CPU) / self._machine.host.speed)
        elif updated:
            job.updaters = tuple(work.gpu for work in takers)
            own = place.residence
            states = [taken(TensorKind.OPTIMIZER_STATE, pack, work) if own.state else 0 for work in takers]
            again = [taken(TensorKind.GRADIENT, pack, work) for work in takers] if self._at_end else [0] * len(takers)
            weights = [sum(taken(TensorKind.WEIGHT, run, work) for run in updated) for work in takers]
            if self._at_end and own.weights_in:
                again = [size + weight for size, weight in zip(again, weights, strict=True)]
            weights = weights if scattered else [own.weights_home]
            whole = costs.update_ns(*pack, Phase.UPDATE_GPU)
            parts = [self._shards.updated(pack, gpu) if scattered else 1 for gpu in job.updaters]
            speeds = [self._machine.gpus[gpu].speed for gpu in job.updaters]
            job.update_ns = min(math.floor(whole * part / speed) for part, speed in zip(parts, speeds, strict=True))
            into, out = ([ways[gpu] for gpu in job.updaters] for ways in (self._ways.into, self._ways.out))
            coming = [state + more for state, more in zip(states, again, strict=True)]
            job.state_in_ns = min(way.ns(size) for way, size in zip(into, coming, strict=True))
            job.after_update_ns = min(way.ns(size) for way, size in zip(out, weights, strict=True))
            for work, state, weight, size in zip(takers, states, weights, coming, strict=True):
                work.in_bytes += size
                work.out_bytes += state + weight
