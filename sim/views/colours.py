"""One colour per task kind and per tensor kind, the same in every picture; told apart by colour-blind eyes too.

Task kinds use the palette of Okabe and Ito (2008) and grey, tensor kinds Paul Tol's "muted" scheme. The parts of a
backward are darker and lighter than a whole one, the halves of an all-reduce darker than that.
"""

from __future__ import annotations

from ..schedule import TaskKind, TensorKind

TASK_COLOURS: dict[TaskKind, str] = {
    TaskKind.FORWARD: "#56B4E9",
    TaskKind.BACKWARD: "#0072B2",
    TaskKind.BACKWARD_INPUT: "#004D7A",
    TaskKind.BACKWARD_WEIGHT: "#7FB8DA",
    TaskKind.RECOMPUTE: "#999999",
    TaskKind.UPDATE: "#009E73",
    TaskKind.REDUCE: "#000000",
    TaskKind.NORM: "#4D4D4D",
    TaskKind.ALLREDUCE: "#F0E442",
    TaskKind.REDUCE_SCATTER: "#B8A200",
    TaskKind.ALL_GATHER: "#5C4A00",
    TaskKind.SWAP_IN: "#E69F00",
    TaskKind.SWAP_OUT: "#D55E00",
    TaskKind.P2P: "#CC79A7",
}

TENSOR_COLOURS: dict[TensorKind, str] = {
    TensorKind.WEIGHT: "#332288",
    TensorKind.BUFFER: "#999933",
    TensorKind.GRADIENT: "#882255",
    TensorKind.OPTIMIZER_STATE: "#117733",
    TensorKind.STASH: "#CC6677",
    TensorKind.ACTIVATION: "#88CCEE",
    TensorKind.ACTIVATION_GRADIENT: "#AA4499",
    TensorKind.DATA: "#44AA99",
    TensorKind.WORKSPACE: "#DDCC77",
}
