"""A folder of profile tables in the form of the public artifact's, made up, with every figure in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

LAYERS = 3
FORWARD_SIZES, BACKWARD_SIZES = (1, 2, 4), (1, 2)
WEIGHTS, BUFFERS = (4_000_000, 8_000_000, 0), (0, 1_000, 0)
INPUTS = (80, 1_000, 400)  # a sample
FORWARD_NS, BACKWARD_NS = 1_000_000, 3_500_000  # a sample and layer, 1 ns more for each layer

Lines = list[str]


def forward_ns(layer: int, u: int) -> int:
    return FORWARD_NS * u + layer


def backward_ns(layer: int, u: int) -> int:
    """As profiled: with the forward."""
    return BACKWARD_NS * u + 3 * layer


def forward_peak(layer: int, u: int) -> int:
    """Weights, buffers, input, and 3000 bytes a sample of its own."""
    return WEIGHTS[layer] + BUFFERS[layer] + (INPUTS[layer] + 3_000) * u


def backward_peak(layer: int, u: int) -> int:
    """Weights and their gradients, buffers, input, and 10000 bytes a sample of its own."""
    return 2 * WEIGHTS[layer] + BUFFERS[layer] + (INPUTS[layer] + 10_000) * u


def by_phase(heading: str, forward: Callable[[int, int], object], backward: Callable[[int, int], object]) -> Lines:
    passes = (("FWD", FORWARD_SIZES, forward), ("BWD", BACKWARD_SIZES, backward))
    return [
        heading,
        *(
            f"{phase},{u},{layer},{of(layer, u)}"
            for phase, sizes, of in passes
            for u in sizes
            for layer in range(LAYERS)
        ),
    ]


def tables() -> dict[str, Lines]:
    """The lines of each table."""
    layers = range(LAYERS)
    return {
        "layer_time.csv": by_phase(
            "phase,microbatch,layer,gpu_seconds,cpu_seconds",
            lambda layer, u: f"{forward_ns(layer, u) / 1e9:.10g},0",
            lambda layer, u: f"{backward_ns(layer, u) / 1e9:.10g},0",
        ),
        "layer_memory.csv": by_phase("phase,microbatch,layer,bytes", forward_peak, backward_peak),
        "activation.csv": [
            "microbatch,layer,input_bytes",
            *(f"{u},{layer},{INPUTS[layer] * u}" for u in FORWARD_SIZES for layer in layers),
        ],
        "layer_size.csv": [
            "layer,weight_bytes,buffer_bytes,optimizer_state_bytes",
            *(f"{layer},{WEIGHTS[layer]},{BUFFERS[layer]},{2 * WEIGHTS[layer]}" for layer in layers),
        ],
        "update_time.csv": [
            "layer,gpu_seconds,cpu_seconds",
            *(f"{layer},0,{WEIGHTS[layer] * 1e-9:.10g}" for layer in layers),
        ],
    }


def write(folder: Path, lines: dict[str, Lines] | None = None) -> Path:
    """A folder with these tables, and ``info.json``."""
    folder.mkdir(exist_ok=True)
    for name, table in (lines or tables()).items():
        (folder / name).write_text("\n".join(table) + "\n")
    info = {"model": "made-up", "optimizer": "AdamW", "dtype": "float32", "artifact_folder": "x", "layers": LAYERS}
    (folder / "info.json").write_text(json.dumps(info))
    return folder
