"""Small steps of plain pipelines, moment by moment, worked out by hand.

Two GPUs with two layers each, two samples in microbatches of one. A layer's forward takes 1000 ns, its backward 2000
ns besides recompute; x and g have 1000 bytes, labels 8, and links carry a byte a nanosecond.
"""

from sim.builders import build
from sim.engine.simulate import simulate
from sim.plan import PagedPlan, Policy
from sim.schedule import TaskKind
from tests.sim.handmade import machine
from traces.synthetic import uniform_trace

TRACE = uniform_trace(4, weight_bytes=0, sample_bytes=1000, sample_ns=1000, fixed_ns=0)


def started(policy: Policy, *, recompute: bool) -> dict[int, dict[str, int]]:
    """When the tasks of each GPU start; copies between GPUs are the sender's."""
    plan = PagedPlan(policy=policy, minibatch=2, gpus=2, u_fwd=1, u_bwd=1, recompute=recompute)
    schedule = build(plan, TRACE, machine(gpus=2))
    names = {
        TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.SWAP_IN: "in", TaskKind.P2P: "send",
    }  # fmt: skip
    found: dict[int, dict[str, int]] = {0: {}, 1: {}}
    for task, start in zip(schedule.tasks, simulate(schedule, TRACE, machine(gpus=2)).frame.start_ns, strict=True):
        assert task.gpu is not None
        found[task.gpu][f"{names[task.kind]}{task.layer_first} m{task.microbatch}"] = int(start)
    return found


def test_gpipe():
    """The first stage goes on while the second one works; what it sends waits until all that the second one frees
    before is free."""
    assert started(Policy.GPIPE_SWAP, recompute=True) == {
        0: {
            "in0 m0": 0, "F0 m0": 1000, "F1 m0": 2000, "send2 m0": 3000,
            "in0 m1": 3000, "F0 m1": 4000, "F1 m1": 5000, "send2 m1": 6008,
            "B1 m1": 16016, "B0 m1": 19016,
            "B1 m0": 23016, "B0 m0": 26016,
        },
        1: {
            "F2 m0": 4000, "in4 m0": 5000, "F3 m0": 5008,
            "F2 m1": 7008, "in4 m1": 8008, "F3 m1": 8016,
            "B3 m1": 9016, "B2 m1": 12016, "send2 m1": 15016,
            "B3 m0": 16016, "B2 m0": 19016, "send2 m0": 22016,
        },
    }  # fmt: skip


def test_1f1b_without_recompute():
    """The second stage goes back with the first microbatch before it takes the second one."""
    assert started(Policy.ONE_F_ONE_B_SWAP, recompute=False) == {
        0: {
            "in0 m0": 0, "F0 m0": 1000, "F1 m0": 2000, "send2 m0": 3000,
            "in0 m1": 3000, "F0 m1": 4000, "F1 m1": 5000, "send2 m1": 11008,
            "B1 m0": 11008, "B0 m0": 13008,
            "B1 m1": 19016, "B0 m1": 21016,
        },
        1: {
            "F2 m0": 4000, "in4 m0": 5000, "F3 m0": 5008,
            "B3 m0": 6008, "B2 m0": 8008, "send2 m0": 10008,
            "F2 m1": 12008, "in4 m1": 13008, "F3 m1": 13016,
            "B3 m1": 14016, "B2 m1": 16016, "send2 m1": 18016,
        },
    }  # fmt: skip
