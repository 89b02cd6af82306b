"""A schedule as text that a person reads: a row per lane, a column per unit of time.

Every task takes one unit and starts as soon as its dependencies allow, so what stands in one column may happen at
once. How long tasks really take is a timeline's matter. ::

    slot              0     1      2      3      4
    gpu 0 swap in     w0-3  d0.0   d0.1   .      .
          compute     .     .      F0-3.0 F0-3.1 .
          p2p out     .     .      .      x4.0>1 x4.1>1
    gpu 1 p2p in      .     .      .      x4.0<0 x4.1<0
"""

from __future__ import annotations

from ..schedule import Lane, LaneKey, Schedule, Task, TaskKind, TensorKind
from ..timelines.replay import replay_times

_LETTERS = {
    TaskKind.FORWARD: "F",
    TaskKind.BACKWARD: "B",
    TaskKind.BACKWARD_INPUT: "BI",
    TaskKind.BACKWARD_WEIGHT: "BW",
    TaskKind.RECOMPUTE: "f",
    TaskKind.UPDATE: "U",
    TaskKind.REDUCE: "R",
    TaskKind.NORM: "N",
    TaskKind.ALLREDUCE: "A",
    TaskKind.REDUCE_SCATTER: "RS",
    TaskKind.ALL_GATHER: "AG",
}
_TENSORS = {
    TensorKind.WEIGHT: "w",
    TensorKind.BUFFER: "b",
    TensorKind.GRADIENT: "dw",
    TensorKind.OPTIMIZER_STATE: "k",
    TensorKind.STASH: "s",
    TensorKind.ACTIVATION: "x",
    TensorKind.ACTIVATION_GRADIENT: "g",
    TensorKind.DATA: "d",
    TensorKind.WORKSPACE: "t",
}
_EMPTY = "."
LEGEND = (
    "F forward, f the same repeated, B backward (BI, BW: its parts for inputs and weights), U update, R reduce,\n"
    "N norm, A all-reduce, RS reduce-scatter, AG all-gather; copies: w weight, b buffer, dw gradient,\n"
    "k optimizer state, s stash, x activation, g its gradient, d data; then layers, .microbatch, >to or <from"
)


def grid(schedule: Schedule, *, max_slots: int = 96, width: int = 160) -> str:
    """The schedule's lanes over its first ``max_slots`` units of time, in blocks of at most ``width`` characters.

    Raises ScheduleError if a task waits for a later one.
    """
    slots = replay_times(schedule, [1] * len(schedule.tasks)).start_ns
    total = max(slots, default=-1) + 1
    shown = min(total, max_slots)
    rows = {key: [_EMPTY] * shown for key in sorted(schedule.lanes, key=_row_order)}
    for task, slot in zip(schedule.tasks, slots, strict=True):
        if slot < shown:
            for key in task.lanes:
                rows[key][slot] = _cell(task, key)
    header = [str(slot) for slot in range(shown)]
    table = list(zip(["slot", *_row_names(list(rows))], [header, *rows.values()], strict=True))
    widths = [max(map(len, column)) for column in zip(header, *rows.values(), strict=True)]
    margin = max(len(name) for name, _ in table)
    blocks = [
        "\n".join(_line(name, cells[first:last], widths[first:last], margin) for name, cells in table)
        for first, last in _blocks(widths, width - margin)
    ]
    if total > shown:
        blocks.append(f"… and {total - shown} more slots of {total}; ask for more with max_slots={total}")
    return "\n\n".join([*blocks, LEGEND]) + "\n"


def _cell(task: Task, lane: LaneKey) -> str:
    first, last = task.layer_first, task.layer_last
    letter = _TENSORS[task.tensor_kind] if task.tensor_kind and task.kind not in _LETTERS else _LETTERS[task.kind]
    run = f"{first}-{last}" if first != last else f"{first}"
    part = "" if task.microbatch is None else f".{task.microbatch}"
    other = "" if task.peer is None else f">{task.peer}" if lane == task.lanes[0] else f"<{task.gpu}"
    return f"{letter}{run}{part}{other}"


def _row_order(lane: LaneKey) -> tuple[bool, int, int]:
    gpu, kind = lane
    return (gpu is None, gpu or 0, list(Lane).index(kind))


def _row_names(lanes: list[LaneKey]) -> list[str]:
    """Names of the rows; a device is named in its first row only."""
    names, previous = [], None
    for gpu, lane in lanes:
        device = "all" if lane is Lane.COLLECTIVE else "host" if gpu is None else f"gpu {gpu}"
        names.append(f"{device if device != previous else '':6}{lane.value.replace('_', ' ')}")
        previous = device
    return names


def _blocks(widths: list[int], room: int) -> list[tuple[int, int]]:
    """Cut the columns into runs ``[first, last)`` that fit into ``room`` characters, each at least one column."""
    blocks, first, used = [], 0, 0
    for slot, width in enumerate(widths):
        if slot > first and used + width + 1 > room:
            blocks.append((first, slot))
            first, used = slot, 0
        used += width + 1
    return [*blocks, (first, len(widths))]


def _line(name: str, cells: list[str], widths: list[int], margin: int) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{name:{margin}} {' '.join(padded)}".rstrip()
