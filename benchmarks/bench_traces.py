"""How long traces take: to measure, to import, to write and to load.

Each is wall-clock time on this computer, the least of three but for measuring. Loading is that of the largest shipped
traces; importing reads the measured profiles beside this checkout, where they are there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import sim
from executor import Workload, profile
from executor.models.data import next_token_loss, text_batches
from sim.tables import Table
from sim.units import format_bytes, format_seconds
from traces.files import save_trace
from traces.importing.sources import import_trace

BLOCKS = 48
SEQUENCE = 128
LARGEST = ("gpt2-100b@gtx-1080-ti", "resnet1026@gtx-1080-ti", "bert96@gtx-1080-ti", "vgg416@gtx-1080-ti")
PROFILES = Path(__file__).resolve().parent.parent.parent / "shared" / "reference" / "gtx1080ti"


def equal_blocks() -> Workload:
    """A GPT-2 of 48 equal blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_embd=512, n_layer=BLOCKS, n_head=8, n_positions=SEQUENCE, vocab_size=256, **tokens)
    return Workload("48 blocks", GPT2LMHeadModel(config).train(), next_token_loss, text_batches(SEQUENCE))


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The least time that the work takes."""
    least = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - started)
    return least


def rows(folder: Path) -> list[tuple[str, str, str]]:
    """What was done, to how much, and how long it took."""
    found = []
    workload = equal_blocks()
    for sizes, repeats in (((1,), 3), ((1, 2, 4, 8), 3)):
        took = seconds(lambda sizes=sizes, repeats=repeats: profile(workload, microbatches=sizes, repeats=repeats), 1)
        found.append((f"profile {BLOCKS} equal blocks", f"sizes {','.join(map(str, sizes))}", format_seconds(took)))
    for name in LARGEST:
        trace = sim.load_trace(name)
        path = folder / f"{name}.json"
        size = f"{len(trace.layers)} layers"
        found.append((f"load {name}", size, format_seconds(seconds(lambda name=name: sim.load_trace(name)))))
        written = seconds(lambda trace=trace, path=path: save_trace(trace, path))
        found.append((f"write {name}", format_bytes(path.stat().st_size), format_seconds(written)))
        found.append(
            (f"load {name}, not packed", size, format_seconds(seconds(lambda path=path: sim.load_trace(path))))
        )
    for source in sorted(PROFILES.glob("*")) if PROFILES.is_dir() else ():
        if source.is_dir():
            took = seconds(lambda source=source: import_trace(source), 1)
            found.append((f"import {source.name}", "measured profile", format_seconds(took)))
    return found


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table("Traces", ("", "of", "takes"), tuple(rows(Path(folder))))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
