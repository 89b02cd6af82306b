"""Baselines: plain schedules, layer by layer, that rely on a pager to fit.

``dp-swap``: every GPU has the whole model and its share of the minibatch. Per microbatch it goes forward through all
layers, then backward; each backward repeats its layer's forward from the layer's input. The last microbatch's
backward also reduces the gradients over the GPUs. All layers are updated after all backwards, each GPU its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.costs import Costs

from ..errors import DoesNotFit
from ..hardware.machine import Machine
from ..plan import PagedPlan, pieces, shares
from ..schedule import Interval, MemoryPlan, Schedule
from .draft import Draft, assign_lifetimes, finish
from .memory import count_host, count_pages
from .paged_tasks import PagedGpu, play_together
from .paging import PagedStep, Pager
from .plain_steps import PlainSteps
from .store_bytes import store_bytes


def build_paged(plan: PagedPlan, costs: Costs, machine: Machine) -> Schedule:
    """The Schedule of a baseline. Raises DoesNotFit if a step alone exceeds its GPU's memory, or if the host is too
    small for the GPUs' private copies of all state.
    """
    caps = tuple(gpu.usable_bytes for gpu in machine.gpus)
    draft = Draft()
    gpus = [
        PagedGpu(
            draft,
            gpu,
            Pager(gpu, cap, plan.residency, plan.writeback),
            dp_swap_steps(costs, pieces(*share, plan.u_fwd)),
        )
        for gpu, (cap, share) in enumerate(zip(caps, shares(plan.minibatch, plan.gpus), strict=True))
    ]
    play_together(draft, gpus)
    assign_lifetimes(draft)
    gpu_peaks = count_pages(draft, caps)
    host_store = store_bytes(costs, plan.minibatch, copies=plan.gpus)
    host_peak = host_store + count_host(draft, plan.gpus)
    host_cap = machine.host.memory_bytes
    if host_cap is not None and host_peak > host_cap:
        what = f"the state of {plan.gpus} GPU(s) with private copies ({host_store} B with the data) and the stashes"
        raise DoesNotFit(None, (0, costs.layer_count - 1), what, host_peak, host_cap)
    memory = MemoryPlan(
        gpu_peak_bytes=gpu_peaks,
        gpu_cap_bytes=caps,
        host_store_bytes=host_store,
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


def dp_swap_steps(costs: Costs, microbatches: Sequence[Interval]) -> list[PagedStep]:
    """All steps of a GPU of ``dp-swap`` whose share of the minibatch is cut into these microbatches, in order."""
    make = PlainSteps(costs, microbatches)
    layers = range(costs.layer_count)
    steps: list[PagedStep] = []
    for microbatch in range(len(microbatches)):
        steps += [make.forward(layer, microbatch) for layer in layers]
        steps += [make.backward(layer, microbatch) for layer in reversed(layers)]
    return steps + [make.update(layer) for layer in layers if costs.updates(layer)]
