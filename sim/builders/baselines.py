"""Baselines: plain schedules, layer by layer, that rely on a pager to fit.

``dp-swap``: every GPU has the whole model and its share of the minibatch. Per microbatch it goes forward through all
layers, then backward. The last microbatch's backward also reduces the gradients over the GPUs.

``gpipe-swap`` and ``1f1b-swap``: every GPU has a stage, some consecutive layers, and what passes between stages goes
from GPU to GPU. They differ in the order of microbatches (``stages.py``).

All layers of a GPU are updated after all its backwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from traces.costs import Costs

from ..errors import DoesNotFit
from ..hardware.machine import Machine
from ..plan import PagedPlan
from ..schedule import MemoryPlan, Schedule, TaskKind
from .draft import Draft, assign_lifetimes, finish
from .memory import count_host, count_pages
from .paged_tasks import PagedGpu, StoreOrder, play_together
from .paging import Event, PagedStep, Pager, Tensor
from .plain_steps import PlainSteps
from .stages import assignments, turns
from .store_bytes import store_by_kind


def build_paged(plan: PagedPlan, costs: Costs, machine: Machine) -> Schedule:
    """The Schedule of a baseline.

    Raises DoesNotFit if a step does not fit its GPU, alone or beside what waits to be sent, or if the host is too small
    for the state; PlanError for a pipeline with fewer layers than GPUs.
    """
    caps = tuple(gpu.usable_bytes for gpu in machine.gpus)
    draft = Draft()
    sent: dict[Event, tuple[PagedGpu, Tensor]] = {}
    shared = StoreOrder()
    gpus = [
        PagedGpu(
            draft,
            gpu,
            Pager(gpu, cap, plan.residency, plan.writeback, plan.prefetch_depth),
            steps,
            StoreOrder() if plan.policy.has_private_stores else shared,
            sent,
        )
        for gpu, (cap, steps) in enumerate(zip(caps, plain_steps(plan, costs), strict=True))
    ]
    play_together(draft, gpus)
    assign_lifetimes(draft)
    gpu_peaks = count_pages(draft, caps)
    copies = plan.gpus if plan.policy.has_private_stores else 1
    host_store = store_by_kind(costs, plan.minibatch, copies=copies)
    host_store_bytes = sum(host_store.values())
    host_peak = host_store_bytes + count_host(draft, plan.gpus)
    host_cap = machine.host.memory_bytes
    if host_cap is not None and host_peak > host_cap:
        whose = f"{copies} private copies of the state" if plan.policy.has_private_stores else "the state"
        what = f"{whose} ({host_store_bytes} B with the data) and what goes out besides"
        raise DoesNotFit(None, (0, costs.layer_count - 1), what, host_peak, host_cap)
    memory = MemoryPlan(
        gpu_peak_bytes=gpu_peaks,
        gpu_cap_bytes=caps,
        host_store=host_store,
        host_peak_bytes=host_peak,
        host_cap_bytes=host_cap,
    )
    return finish(
        draft,
        model=costs.trace.model,
        plan=plan,
        layers=costs.layer_count,
        memory=memory,
        offsets=[None] * len(draft.buffers),
    )


def plain_steps(plan: PagedPlan, costs: Costs) -> Iterator[list[PagedStep]]:
    """All steps of each GPU, in its order: its turns, layer by layer, and then the updates."""
    for layers, stage, stages, microbatches in assignments(plan, costs):
        make = PlainSteps(costs, microbatches, layers, recompute=plan.recompute)
        steps = []
        for kind, microbatch in turns(plan.policy, stage, stages, len(microbatches)):
            if kind is TaskKind.FORWARD:
                steps += [make.forward(layer, microbatch) for layer in make.layers]
            else:
                steps += [make.backward(layer, microbatch) for layer in reversed(make.layers)]
        yield steps + [make.update(layer) for layer in make.updated]
