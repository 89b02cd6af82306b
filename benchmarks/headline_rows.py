"""Rows of the headline benchmark: what is recorded of a case, and the tables that are made of the rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from sim.tables import MISSING, Table
from sim.units import NS_PER_S, format_bytes, format_seconds
from traces.files import write_atomically

THROUGHPUT_CLAIM, SWAP_CLAIM = 7.6, 100.0
"""The paper's: up to so many times the throughput, and up to so many times less swap."""


class Setting(NamedTuple):
    """What is compared: a model, GPUs, and samples in a step."""

    model: str
    gpus: int
    minibatch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, D = {self.minibatch}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A finished case. ``variant`` is what was asked for, ``plan`` what that came to; no step if nothing fits."""

    model: str
    gpus: int
    minibatch: int
    policy: str
    variant: str
    plan: str = ""
    step_ns: int | None = None
    swap_in_bytes: int | None = None
    swap_out_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_cap_bytes: int
    simulated: int = 0
    gap: float | None = None
    cpu_s: float
    refusal: str = ""

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.gpus, self.minibatch)

    @property
    def key(self) -> tuple[str, ...]:
        return (*map(str, self.setting), self.policy, self.variant)

    @property
    def is_harmony(self) -> bool:
        return self.policy.startswith("harmony")

    @property
    def swap_bytes(self) -> int:
        return (self.swap_in_bytes or 0) + (self.swap_out_bytes or 0)

    @property
    def fits_host(self) -> bool:
        return self.host_peak_bytes is not None and self.host_peak_bytes <= self.host_cap_bytes


def load(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        records = [{name: cell for name, cell in record.items() if cell} for record in csv.DictReader(file)]
    return [msgspec.convert(record, Row, strict=False) for record in records]


def save(path: Path, rows: Sequence[Row]) -> None:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, Row.__struct_fields__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(msgspec.structs.asdict(row) for row in rows)
    write_atomically(path, out.getvalue().encode())


def settings_of(rows: Iterable[Row]) -> Iterator[tuple[Setting, list[Row], Row | None]]:
    """Each setting with its rows, and the fastest Harmony plan (one that fits the host if there is any)."""
    for setting, group in groupby(sorted(rows, key=lambda row: row.setting), key=lambda row: row.setting):
        own = list(group)
        harmony = [row for row in own if row.is_harmony and row.step_ns is not None]
        yield setting, own, min(harmony, key=lambda row: (not row.fits_host, row.step_ns), default=None)


def case_table(rows: Sequence[Row]) -> Table:
    """A row for each case, with its ratios to the best Harmony plan of the setting."""
    columns = (
        "model",
        "GPUs",
        "D",
        "plan",
        "asked for",
        "step",
        "over Harmony",
        "swap",
        "over Harmony",
        "GPU peak",
        "host",
    )
    lines = []
    for _, own, best in settings_of(rows):
        for row in sorted(own, key=lambda row: (not row.is_harmony, row.policy, row.variant)):
            against = best if row is not best else None
            lines.append(
                (
                    row.model,
                    str(row.gpus),
                    str(row.minibatch),
                    row.plan or f"{row.policy}: {row.refusal}",
                    row.variant,
                    MISSING if row.step_ns is None else format_seconds(row.step_ns / NS_PER_S),
                    _times(row.step_ns, against and against.step_ns),
                    MISSING if row.step_ns is None else format_bytes(row.swap_bytes),
                    _times(row.step_ns and row.swap_bytes, against and against.swap_bytes),
                    MISSING if row.gpu_peak_bytes is None else format_bytes(row.gpu_peak_bytes),
                    _host(row),
                )
            )
    return Table("Headline, case by case", columns, tuple(lines), words=5)


def claim_table(rows: Sequence[Row]) -> Table:
    """By baseline and variant: ratios to the best Harmony plan over all settings, and how often the claims hold."""
    ratios: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    for _, own, best in settings_of(rows):
        for row in own:
            if best is None or row.is_harmony or row.step_ns is None:
                continue
            assert best.step_ns is not None
            pair = (row.step_ns / best.step_ns, row.swap_bytes / best.swap_bytes, row.fits_host)
            ratios.setdefault((row.policy, row.variant), []).append(pair)
    columns = (
        "baseline", "asked for", "settings", "fit the host", "time over Harmony, least", "median", "most",
        f"at least {THROUGHPUT_CLAIM}x", "swap over Harmony, least", "median", "most", f"at least {SWAP_CLAIM:.0f}x",
    )  # fmt: skip
    lines = []
    for (policy, variant), found in sorted(ratios.items()):
        time, swap = [pair[0] for pair in found], [pair[1] for pair in found]
        lines.append(
            (
                policy,
                variant,
                str(len(found)),
                str(sum(pair[2] for pair in found)),
                *(f"{of(time):.2f}x" for of in (min, median, max)),
                str(sum(ratio >= THROUGHPUT_CLAIM for ratio in time)),
                *(f"{of(swap):.1f}x" for of in (min, median, max)),
                str(sum(ratio >= SWAP_CLAIM for ratio in swap)),
            )
        )
    return Table("What the best Harmony plan gains over each baseline", columns, tuple(lines), words=2)


def markdown(table: Table) -> str:
    """The table in Markdown."""
    sides = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (table.columns, sides, *table.rows)) + "\n"


def _times(amount: int | None, of: int | None) -> str:
    return MISSING if amount is None or not of else f"{amount / of:.2f}x"


def _host(row: Row) -> str:
    if row.host_peak_bytes is None:
        return MISSING
    size = format_bytes(row.host_peak_bytes)
    return size if row.fits_host else f"{size}, more than there is"
