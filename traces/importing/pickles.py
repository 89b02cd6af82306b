"""A LayerProfile from a profile folder of the public Harmony artifact, as published: pickles of its own classes.

A pickle can run code when it is loaded. Here one may name only the few classes of the artifact, PyTorch's shapes and
dtypes, and ordered dictionaries; each becomes plain data, and any other name is refused. Neither the artifact's code
nor PyTorch is needed.

    prof_TIME_FWDBWD    stats[FWD, BWD][microbatch][layer] = {GPU, CPU} in seconds
    prof_TIME_UPD       stats[UPD][layer] = {GPU, CPU}
    prof_MEMORY_FWDBWD  stats[FWD, BWD][microbatch][layer] = bytes
    prof_XMETA, _TMETA  stats[microbatch][layer] = inputs; labels
    prof_WMETA, _BMETA  param_size[layer] = weights; buffers
    prof_KMETA          state_size[layer] = optimizer state
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .assembly import ARTIFACT_DEVICE, About, ProfileTables, Spec, assemble
from .profile import LayerProfile
from .tables import Table, checked, read_bytes, text_of

_CLASSES = ("BMeta", "ConstMeta", "KMeta", "Memory", "TMeta", "TensorMeta", "Time", "WMeta", "XMeta")
_DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}

Record = dict[str, object]


def is_profile_folder(folder: Path) -> bool:
    """Whether the artifact's pickles are here, or in ``prof`` here."""
    return (_place(folder) / "prof_TIME_FWDBWD.pickle").exists()


def read_profile(folder: Path) -> LayerProfile:
    """Read all pickles of a folder. Raises TraceError that names the file and what is wrong in it."""
    place = _place(folder)
    files = {
        name: _Pickle(place / f"prof_{name}.pickle")
        for name in ("TIME_FWDBWD", "TIME_UPD", "MEMORY_FWDBWD", "XMETA", "TMETA", "WMETA", "BMETA", "KMETA")
    }
    records: dict[str, tuple[_Pickle, Callable[[], Iterator[Record]]]] = {
        "times": (files["TIME_FWDBWD"], lambda: _times(files["TIME_FWDBWD"])),
        "memory": (files["MEMORY_FWDBWD"], lambda: _memory(files["MEMORY_FWDBWD"])),
        "inputs": (files["XMETA"], lambda: _inputs(files["XMETA"])),
        "sizes": (files["WMETA"], lambda: _sizes(files["WMETA"], files["BMETA"], files["KMETA"])),
        "updates": (files["TIME_UPD"], lambda: _updates(files["TIME_UPD"])),
    }

    def read(name: str, spec: Spec) -> Table:
        file, of = records[name]
        found = list(file.plainly(of))
        header = list(found[0]) if found else [column.headings[0] for column in spec.columns]
        rows = ((None, [text_of(value) for value in record.values()]) for record in found)
        return checked(file.source, header, rows, spec.columns, spec.key)

    labels = files["TMETA"].plainly(lambda: _label_bytes(files["TMETA"]))
    about = About(
        model=place.resolve().parent.name if place.name == "prof" else place.resolve().name,
        device=ARTIFACT_DEVICE,
        label_bytes_per_sample=labels,
    )
    return assemble(str(folder), about, ProfileTables.read(read))


def _place(folder: Path) -> Path:
    return folder / "prof" if (folder / "prof").is_dir() else folder


class _Pickle:
    """One file, read when first asked."""

    def __init__(self, path: Path) -> None:
        self.source, self._path = str(path), path
        self._fields: Mapping[str, Any] | None = None

    def __getitem__(self, field: str) -> Any:
        """A field of the object in the file."""
        if self._fields is None:
            self._fields = vars(_load(self._path))
        if field not in self._fields:
            raise TraceError(self.source, "", f"has no {field}; it holds {', '.join(self._fields) or 'nothing'}")
        return self._fields[field]

    def plainly(self, read: Callable[[], Any]) -> Any:
        """What ``read`` returns; TraceError if the data has not the form that it takes for granted."""
        try:
            result = read()
            return list(result) if isinstance(result, Iterator) else result
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(self.source, "", f"has another form than the artifact's: {error!r}") from None


def _times(file: _Pickle) -> Iterator[Record]:
    for phase, u, layer, seconds in _three_deep(file["stats"]):
        own = {"gpu_seconds": seconds["GPU"], "cpu_seconds": seconds["CPU"]}
        yield {"phase": phase, "microbatch": u, "layer": layer, **own}


def _memory(file: _Pickle) -> Iterator[Record]:
    for phase, u, layer, size in _three_deep(file["stats"]):
        yield {"phase": phase, "microbatch": u, "layer": layer, "bytes": size}


def _inputs(file: _Pickle) -> Iterator[Record]:
    for u, layers in file["stats"].items():
        for layer, tensors in layers.items():
            yield {"microbatch": u, "layer": layer, "input_bytes": _bytes(tensors)}


def _sizes(weights: _Pickle, buffers: _Pickle, states: _Pickle) -> Iterator[Record]:
    for layer, tensors in weights["param_size"].items():
        yield {
            "layer": layer,
            "weight_bytes": _bytes(tensors),
            "buffer_bytes": _bytes(buffers["param_size"][layer]),
            "optimizer_state_bytes": _bytes(states["state_size"][layer]),
        }


def _updates(file: _Pickle) -> Iterator[Record]:
    for layer, seconds in file["stats"]["UPD"].items():
        yield {"layer": layer, "cpu_seconds": seconds["CPU"], "gpu_seconds": seconds["GPU"]}


def _label_bytes(file: _Pickle) -> int:
    """Of one sample, by the smallest microbatch."""
    u = min(file["stats"])
    return _bytes(file["stats"][u]) // int(u)


def _three_deep(stats: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    for phase, by_size in stats.items():
        for u, layers in by_size.items():
            for layer, value in layers.items():
                yield phase, u, layer, value


def _bytes(tensors: Any) -> int:
    """Of all tensors in it. Constants, such as the number of steps an optimizer counts, take none."""
    if tensors is None:
        return 0
    if isinstance(tensors, Mapping):
        return sum(map(_bytes, tensors.values()))
    if isinstance(tensors, list | tuple):
        return sum(map(_bytes, tensors))
    fields = vars(tensors)
    return 0 if "const" in fields else math.prod(fields["shape"]) * _DTYPE_BYTES[fields["dtype"]]


def _load(path: Path) -> Any:
    data = read_bytes(path)
    try:
        return _Loader(data, str(path)).load()
    except TraceError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise TraceError(str(path), "", f"is no profile, or a damaged one: {error!r}") from None


class _Loader(pickle.Unpickler):
    """Loads plain data and the artifact's own objects, as things that only have fields."""

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source
        # Made for this one load, so that a pickle that tampers with a class does so for nobody else.
        self._known: dict[tuple[str, str], Any] = {("prof_data_struct", name): type(name, (), {}) for name in _CLASSES}
        self._known |= {("torch", name): name for name in _DTYPE_BYTES}
        self._known |= {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name. Raises TraceError for a name that a profile does not need."""
        try:
            return self._known[module, name]
        except KeyError:
            known = "the artifact's profile classes, torch.Size, torch's dtypes and collections.OrderedDict"
            problem = f"names {module}.{name}, so it was not loaded; a profile needs only {known}"
            raise TraceError(self._source, "", problem) from None
