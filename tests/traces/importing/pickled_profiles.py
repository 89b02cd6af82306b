"""A profile as the public artifact pickles it, made up: the same figures as in ``profile_folders``."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.traces.importing.profile_folders import (
    BACKWARD_SIZES,
    BUFFERS,
    FORWARD_SIZES,
    INPUTS,
    LAYERS,
    WEIGHTS,
    backward_ns,
    backward_peak,
    forward_ns,
    forward_peak,
)

LABEL_BYTES = 16


def objects(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each file holds. Until the test ends, stand-ins for the artifact's modules can be imported by name."""
    modules = {name: ModuleType(name) for name in ("prof_data_struct", "torch")}
    for name in ("Time", "Memory", "XMeta", "TMeta", "WMeta", "BMeta", "KMeta", "TensorMeta", "ConstMeta"):
        vars(modules["prof_data_struct"])[name] = type(name, (), {"__module__": "prof_data_struct"})
    vars(modules["torch"])["Size"] = type(
        "Size", (tuple,), {"__module__": "torch", "__reduce__": lambda self: (type(self), (tuple(self),))}
    )
    for name in ("float32", "int64"):
        kind = type("dtype", (), {"__module__": "torch", "__reduce__": lambda self, name=name: name})
        vars(modules["torch"])[name] = kind()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def made(kind: str, **fields: Any) -> Any:
        thing = getattr(modules["prof_data_struct"], kind)()
        vars(thing).update(fields)
        return thing

    def tensor(size: int, dtype: str = "float32") -> Any:
        """A tensor of so many bytes."""
        items = size // (4 if dtype == "float32" else 8)
        shape = modules["torch"].Size((1, items))
        return made("TensorMeta", name="t", shape=shape, dtype=getattr(modules["torch"], dtype), is_ubatch=False)

    def by_layer(of: Any) -> OrderedDict[int, Any]:
        return OrderedDict((layer, of(layer)) for layer in range(LAYERS))

    def by_pass(forward: Any, backward: Any) -> OrderedDict[str, Any]:
        return OrderedDict(
            FWD=OrderedDict((u, by_layer(lambda layer, u=u: forward(layer, u))) for u in FORWARD_SIZES),
            BWD=OrderedDict((u, by_layer(lambda layer, u=u: backward(layer, u))) for u in BACKWARD_SIZES),
        )

    def seconds(of: Any) -> Any:
        return lambda layer, u: OrderedDict(GPU=of(layer, u) / 1e9, CPU=0.0)

    def sized(of: Any) -> OrderedDict[int, Any]:
        return by_layer(lambda layer: OrderedDict(t=tensor(of[layer])) if of[layer] else None)

    def by_size(of: Any) -> OrderedDict[int, Any]:
        return OrderedDict((u, of(u)) for u in FORWARD_SIZES)

    inputs = by_size(lambda u: by_layer(lambda layer: OrderedDict(x=tensor(INPUTS[layer] * u))))
    labels = by_size(lambda u: OrderedDict({LAYERS - 1: OrderedDict(y=tensor(LABEL_BYTES * u, "int64"))}))
    updates = by_layer(lambda layer: OrderedDict(GPU=0.0, CPU=WEIGHTS[layer] / 1e9))
    steps = made("ConstMeta", name="step", const=1)
    states = by_layer(lambda layer: OrderedDict({0: {"step": steps, "m": tensor(2 * WEIGHTS[layer])}}))
    return {
        "TIME_FWDBWD": made("Time", stats=by_pass(seconds(forward_ns), seconds(backward_ns))),
        "TIME_UPD": made("Time", stats=OrderedDict(UPD=updates)),
        "MEMORY_FWDBWD": made("Memory", stats=by_pass(forward_peak, backward_peak)),
        "XMETA": made("XMeta", stats=inputs),
        "TMETA": made("TMeta", stats=labels),
        "WMETA": made("WMeta", param_size=sized(WEIGHTS)),
        "BMETA": made("BMeta", param_size=sized(BUFFERS)),
        "KMETA": made("KMeta", state_size=states),
    }


def write(folder: Path, files: dict[str, Any]) -> Path:
    """A folder with these pickles in ``prof``."""
    (folder / "prof").mkdir(parents=True)
    for name, thing in files.items():
        (folder / "prof" / f"prof_{name}.pickle").write_bytes(pickle.dumps(thing, protocol=3))
    return folder
