"""Rows of the headline benchmark: what is recorded of a case, and the tables that are made of the rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
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
    def found(self) -> str:
        """The plan, as far as what was asked for leaves it open."""
        own = self.plan.removeprefix(f"{self.policy} ")
        return own if self.is_harmony else own.partition(",")[0]

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


class Comparison(NamedTuple):
    """The rows of a setting, and Harmony's plans to compare with: the fastest, and the one that swaps least."""

    setting: Setting
    rows: list[Row]
    fastest: Row | None
    thriftiest: Row | None


def comparisons(rows: Iterable[Row]) -> Iterator[Comparison]:
    """One for each setting. If some plans of Harmony fit the host, only those count."""
    for setting, group in groupby(sorted(rows, key=lambda row: row.setting), key=lambda row: row.setting):
        own = list(group)
        harmony = [row for row in own if row.is_harmony and row.step_ns is not None]
        harmony = [row for row in harmony if row.fits_host] or harmony
        fastest = min(harmony, key=lambda row: row.step_ns or 0, default=None)
        yield Comparison(setting, own, fastest, min(harmony, key=lambda row: row.swap_bytes, default=None))


def case_table(rows: Sequence[Row]) -> Table:
    """A row for each case, with its ratios to the fastest Harmony plan of the setting."""
    ratios = ("step", "over Harmony", "swap", "over Harmony")
    columns = ("model", "GPUs", "D", "policy", "asked for", "found", *ratios, "GPU peak", "host")
    lines = []
    for setting, own, best, _ in comparisons(rows):
        for row in sorted(own, key=lambda row: (not row.is_harmony, row.policy, row.variant)):
            against = best if row is not best else None
            lines.append(
                (
                    *map(str, setting),
                    row.policy,
                    row.variant,
                    row.found or row.refusal,
                    MISSING if row.step_ns is None else format_seconds(row.step_ns / NS_PER_S),
                    _times(row.step_ns, against and against.step_ns),
                    MISSING if row.step_ns is None else format_bytes(row.swap_bytes),
                    _times(row.step_ns and row.swap_bytes, against and against.swap_bytes),
                    MISSING if row.gpu_peak_bytes is None else format_bytes(row.gpu_peak_bytes),
                    _host(row),
                )
            )
    return Table("Headline, case by case", columns, tuple(lines), words=6)


def claim_table(rows: Sequence[Row]) -> Table:
    """By baseline and variant: ratios to Harmony's plans over all settings, and how often the claims hold."""
    ratios: dict[tuple[str, str], list[tuple[float, float, float, bool]]] = {}
    for _, own, fastest, thriftiest in comparisons(rows):
        for row in own:
            if row.is_harmony or row.step_ns is None or fastest is None or thriftiest is None or not fastest.step_ns:
                continue
            swap = row.swap_bytes
            found = row.step_ns / fastest.step_ns, swap / fastest.swap_bytes, swap / thriftiest.swap_bytes
            ratios.setdefault((row.policy, row.variant), []).append((*found, row.fits_host))
    columns = (
        "baseline", "asked for", "settings", "fit the host", "time over Harmony", f"{THROUGHPUT_CLAIM}x or more",
        "swap over the fastest", "swap over the thriftiest", f"{SWAP_CLAIM:.0f}x or more",
    )  # fmt: skip
    lines = []
    for (policy, variant), found in sorted(ratios.items()):
        time, swap, most_swap, fits = zip(*found, strict=True)
        lines.append(
            (
                policy,
                variant,
                str(len(found)),
                str(sum(fits)),
                _range(time, ".2f"),
                str(sum(ratio >= THROUGHPUT_CLAIM for ratio in time)),
                _range(swap, ".1f"),
                _range(most_swap, ".1f"),
                str(sum(ratio >= SWAP_CLAIM for ratio in most_swap)),
            )
        )
    return Table("What Harmony gains over each baseline", columns, tuple(lines), words=2)


def markdown(table: Table) -> str:
    """The table in Markdown."""
    sides = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (table.columns, sides, *table.rows)) + "\n"


def _range(ratios: Sequence[float], form: str) -> str:
    """From the least to the most; the one there is."""
    least, most = (f"{of(ratios):{form}}" for of in (min, max))
    return f"{least}x" if least == most else f"{least} to {most}x"


def _times(amount: int | None, of: int | None) -> str:
    return MISSING if amount is None or not of else f"{amount / of:.2f}x"


def _host(row: Row) -> str:
    if row.host_peak_bytes is None:
        return MISSING
    size = format_bytes(row.host_peak_bytes)
    return size if row.fits_host else f"{size}, more than there is"
