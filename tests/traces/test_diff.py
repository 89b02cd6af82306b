"""Two traces side by side."""

from __future__ import annotations

from hypothesis import given
from msgspec.structs import replace

from tests.strategies import traces
from traces.diff import Difference, diff
from traces.schema import Phase, Provenance, Trace
from traces.synthetic import uniform_trace


@given(trace=traces())
def test_a_trace_differs_from_itself_in_nothing_whatever_the_order_of_rows(trace: Trace) -> None:
    assert diff(trace, replace(trace, times=trace.times[::-1], sizes=trace.sizes[::-1])) == ()


def test_each_column_that_differs_says_where_most() -> None:
    ours = uniform_trace(3, microbatches=(1, 2))
    times = tuple(
        replace(row, duration_ns=row.duration_ns * (3 if row.layer else 2)) if row.phase is Phase.FORWARD else row
        for row in ours.times
    )
    theirs = replace(ours, device="another", times=times)
    header, forward = diff(ours, theirs)
    assert (header.table, header.column, header.ours, header.theirs) == ("header", "device", "synthetic", "another")
    assert header.change is None
    assert forward == Difference(
        table="times", column="duration_ns", rows=6, where="layer 1, phase forward, microbatch 1", ours=1_100_000,
        theirs=3_300_000, change=2.0,
    )  # fmt: skip


def test_rows_that_only_one_has_are_counted() -> None:
    ours, theirs = uniform_trace(3, microbatches=(1, 2)), uniform_trace(3, microbatches=(2, 4, 8))
    found = {(each.table, each.column): each for each in diff(ours, theirs)}
    assert set(found) == {
        (table, f"rows that only the {which} has") for table in ("times", "sizes") for which in ("first", "second")
    }
    assert found["sizes", "rows that only the first has"].rows == 3
    assert found["sizes", "rows that only the second has"].rows == 6
    assert found["sizes", "rows that only the second has"].where == "layer 0, microbatch 4"


def test_values_are_plain() -> None:
    ours = uniform_trace(2)
    sizes = tuple(replace(row, provenance=Provenance.MEASURED) for row in ours.sizes)
    (found,) = diff(ours, replace(ours, sizes=sizes))
    assert (found.column, found.rows, found.ours, found.theirs) == ("provenance", len(sizes), "modelled", "measured")
