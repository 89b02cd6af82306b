"""Completes a choice: the schedule of the plan that someone meant who fixed only some of its fields.

What is open is filled in plainly, not searched for: microbatches of 1 (or both sizes equal, if one is fixed), and as
few packs as fit; in a pipeline at least one for each GPU. The rest has its default.
"""

from __future__ import annotations

from collections.abc import Iterator

from traces.costs import Costs
from traces.schema import Phase

from ..builders import build_from_costs
from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, PagedPlan, Plan, Policy, ShardedPlan, UpdateOn, shares
from ..schedule import Schedule
from ..units import format_bytes
from .choice import PlanChoice
from .packing import Packer, packing_gpu


def build_choice(choice: PlanChoice, policy: Policy, minibatch: int, costs: Costs, machine: Machine) -> Schedule:
    """Build the first completion of a choice that fits, on all GPUs of the machine.

    Raises PlanError if the choice contradicts the policy, the trace or itself, DoesNotFit if no completion fits.
    """
    refusal: DoesNotFit | None = None
    for plan in completions(choice, policy, minibatch, costs, machine):
        try:
            return build_from_costs(plan, costs, machine)
        except DoesNotFit as error:
            if error.gpu is None:  # the host does not gain from more packs
                raise
            refusal = error
    assert refusal is not None, "completions are never empty"
    raise refusal


def completions(choice: PlanChoice, policy: Policy, minibatch: int, costs: Costs, machine: Machine) -> Iterator[Plan]:
    """Plans that agree with a choice: first with the fewest packs, then with ever more where their count is open."""
    fixed = choice.fixed_for(policy)
    u_fwd, u_bwd = choice.u_fwd or choice.u_bwd or 1, choice.u_bwd or choice.u_fwd or 1
    fixed |= {"policy": policy, "minibatch": minibatch, "gpus": len(machine.gpus), "u_fwd": u_fwd, "u_bwd": u_bwd}
    if policy.is_paged:
        yield PagedPlan(**fixed)
        return
    if not policy.is_harmony:
        yield ShardedPlan(**fixed)
        return
    in_pipeline = policy is Policy.HARMONY_PP
    share = minibatch if in_pipeline else max(stop - start for start, stop in shares(minibatch, len(machine.gpus)))
    on = packing_gpu(costs, machine, min(u_bwd, share), in_pipeline=in_pipeline)
    cap = machine.gpus[on].usable_bytes
    backward = Packer(costs, min(u_bwd, share), Phase.BACKWARD, cap, update=choice.update or UpdateOn.CPU)
    forward = Packer(costs, min(u_fwd, share), Phase.FORWARD, cap)
    least = len(machine.gpus) if in_pipeline else 1
    previous: Plan | None = None
    for more in range(costs.layer_count):
        packs_bwd = choice.packs_bwd
        if not isinstance(packs_bwd, tuple):
            packs_bwd = _packs("packs_bwd", packs_bwd, backward, costs.layer_count, on, cap, least, more)
        packs_fwd = choice.packs_fwd
        if not isinstance(packs_fwd, tuple):
            packs_fwd = _packs("packs_fwd", packs_fwd, forward, packs_bwd[-1][0], on, cap, least, more)
        plan = HarmonyPlan(**{**fixed, "packs_fwd": packs_fwd, "packs_bwd": packs_bwd})
        if plan == previous:
            return
        yield plan
        previous = plan


def _packs(
    name: str, count: int | None, packer: Packer, stop: int, gpu: int, cap: int, least: int, more: int
) -> tuple[Pack, ...]:
    """The layers before ``stop`` in ``count`` packs; if that is open, in the fewest that fit (at least ``least``), and
    ``more``."""
    fewest = packer.smallest_count(stop)
    if fewest is None:
        pack, held = packer.hungriest(stop)
        raise DoesNotFit(gpu, pack, "weights and one microbatch", held, cap)
    if count is not None:
        packs = packer.balanced(count, stop)
        if packs is None:
            raise PlanError(
                f"{name}: layers 0-{stop - 1} cannot be cut into {count} packs that each fit {format_bytes(cap)}; "
                f"the fewest that fit are {fewest}, the most are {stop}"
            )
        return packs
    found: tuple[Pack, ...] = ()
    for number in range(max(fewest, min(least, stop)), stop + 1):
        packs = packer.balanced(number, stop)
        if packs is not None:
            found = packs
            if more == 0:
                break
            more -= 1
    return found or packer.balanced(fewest, stop) or ()
