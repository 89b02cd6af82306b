"""What can be imported, and how it is recognized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..checks import check_trace
from ..errors import TraceError
from ..schema import Trace
from . import pickles, profile_tables
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

    Sources: a folder of CSV tables (see ``profile_tables``), or of the public artifact's pickles (``pickles``).

    Raises TraceError for anything wrong with the source: which file, row or layer, column, and what was found.
    """
    path = Path(source)
    if not path.exists():
        raise TraceError(str(source), "", "no such file or folder")
    read = _profile(path)
    profile = replace(
        read,
        model=model or read.model,
        device=device or read.device,
        label_bytes_per_sample=(
            read.label_bytes_per_sample if label_bytes_per_sample is None else label_bytes_per_sample
        ),
    )
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
        f"is nothing that can be imported; a folder of tables has {', '.join(profile_tables.FILES.values())}, "
        "one of the artifact's profiles has prof_TIME_FWDBWD.pickle",
    )
