"""What can be imported, and how it is recognized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from ..checks import check_trace
from ..errors import TraceError
from ..schema import Trace
from . import pickles, profile_tables, profiler, trace_tables
from .derivation import notes_on, trace_of
from .profile import LayerProfile


@dataclass(frozen=True)
class Imported:
    """A trace from elsewhere, and what whoever uses it should know."""

    trace: Trace
    notes: tuple[str, ...]


def import_trace(
    source: str | Path,
    *,
    model: str | None = None,
    device: str | None = None,
    label_bytes_per_sample: int | None = None,
) -> Imported:
    """Read a trace from what others measured. What is given by name here stands in for what the source says, or lacks.

    Sources: a folder of profile tables (see ``profile_tables``), of the public artifact's pickles (``pickles``), or of
    a trace's own tables (``trace_tables``); or a file that PyTorch's profiler wrote (``profiler``).

    Raises TraceError for anything wrong with the source: which file, row or layer, column, and what was found.
    """
    path = Path(source)
    if not path.exists():
        raise TraceError(str(source), "", "no such file or folder")
    named = {"model": model, "device": device, "label_bytes_per_sample": label_bytes_per_sample}
    given = {name: value for name, value in named.items() if value is not None}
    if path.is_file():
        return Imported(structs.replace(profiler.read_trace(path), **given), ())
    if trace_tables.is_trace_folder(path):
        return Imported(structs.replace(trace_tables.read_trace(path), **given), ())
    profile = replace(_profile(path), **given)  # type: ignore[arg-type]
    trace = trace_of(profile)
    check_trace(trace, str(source))
    return Imported(trace, notes_on(profile))


def _profile(path: Path) -> LayerProfile:
    if any((path / name).exists() for name in profile_tables.FILES.values()):
        return profile_tables.read_profile(path)
    if pickles.is_profile_folder(path):
        return pickles.read_profile(path)
    raise TraceError(
        str(path),
        "",
        f"is nothing that can be imported: a folder of profile tables has {', '.join(profile_tables.FILES.values())}; "
        f"one of the artifact's profiles, prof_TIME_FWDBWD.pickle; one of a trace's tables, {trace_tables.HEADER}",
    )
