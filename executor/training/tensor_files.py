"""Tensors by name in safetensors files: ``stem.safetensors``, or several with the usual index beside them.

Several are ``stem-00001-of-00003.safetensors`` and so on, and ``stem.safetensors.index.json`` says which has which
tensor. Each tensor is written from where it lies and read where the file is mapped, so neither takes a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from traces.errors import FileError

from ..errors import CheckpointError

SUFFIX = ".safetensors"
_IDENTITY = "checkpoint"


class TensorTable:
    """Tensors to be written, by name, all with values; one with the same memory as an earlier one is that one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Take a tensor in; the name that it has here (``name``, if that is free)."""
        while name in self.tensors:
            name += "_"
        memory = _memory(tensor) if tensor.numel() else name
        if memory not in self._names:
            self._names[memory] = name
            self.tensors[name] = tensor.detach()
        return self._names[memory]


def _memory(tensor: Tensor) -> Any:
    """What is equal for tensors that are the same memory seen in the same way."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, in as many files as it takes for each to hold ``shard_bytes``, or one tensor."""
    found: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if found[-1] and held + tensor.nbytes > shard_bytes:
            found.append({})
            held = 0
        found[-1][name] = tensor
        held += tensor.nbytes
    return found


def unwritable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be written, if so."""
    if tensor.is_meta:
        return "has no values (it is on the device meta)"
    return None if tensor.layout is torch.strided else f"is of the layout {tensor.layout}"


def is_written_in_place(tensor: Tensor) -> bool:
    """Whether writing the tensor takes no copy of it."""
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], shard_bytes: int, identity: str) -> None:
    """Write the files and, if there are several, their index. ``identity`` tells them from those of other times.

    Raises FileError if the system refuses, or for tensors that safetensors cannot hold.
    """
    parts = shards(tensors, shard_bytes)
    names = [f"{stem}-{number:05}-of-{len(parts):05}{SUFFIX}" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [f"{stem}{SUFFIX}"]
    for name, part in zip(names, parts, strict=True):
        _write_file(folder / name, part, identity)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        _index(folder, stem).write_bytes(msgspec.json.format(msgspec.json.encode(index)))


def _write_file(path: Path, tensors: Mapping[str, Tensor], identity: str) -> None:
    path.touch()
    mode = path.stat().st_mode  # safetensors makes its own file, which only the owner may read
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt", _IDENTITY: identity},
        )
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        problem = " ".join(str(error).split())
        raise FileError(str(path), f"cannot be written: {problem}") from error
    path.chmod(mode)


class TensorFiles:
    """The tensors of files that :func:`write_tensors` wrote, by name, mapped: read when they are used.

    Raises CheckpointError with the file's name if one is missing, cut off, damaged or of another ``identity``.
    """

    def __init__(self, folder: Path, stem: str, identity: str) -> None:
        single = folder / f"{stem}{SUFFIX}"
        weight_map = None if single.exists() else _weight_map(_index(folder, stem), single)
        paths = [single] if weight_map is None else [folder / name for name in sorted(set(weight_map.values()))]
        self._files: dict[str, Any] = {}
        for path in paths:
            file = _open(path)
            found = (file.metadata() or {}).get(_IDENTITY)
            if found != identity:
                raise CheckpointError(
                    str(path), f"was written with another checkpoint ({found}) than the files beside it ({identity})"
                )
            self._files.update((name, file) for name in file.keys())  # noqa: SIM118  # it is no dictionary
        if weight_map is not None and weight_map.keys() != self._files.keys():
            name = min(weight_map.keys() ^ self._files.keys())
            raise CheckpointError(str(_index(folder, stem)), f"and its files do not agree on {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _index(folder: Path, stem: str) -> Path:
    return folder / f"{stem}{SUFFIX}.index.json"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _weight_map(index: Path, single: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except FileNotFoundError:
        raise CheckpointError(str(single), "is missing") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(str(index), f"is damaged: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(str(path), "is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), f"is damaged: {error}") from error


def memory_of_copies(tensors: Mapping[str, Tensor], shard_bytes: int) -> int:
    """The host memory in bytes that writing takes: of the tensors of one file, those that are copied first."""
    copied = [[t.nbytes for t in part.values() if not is_written_in_place(t)] for part in shards(tensors, shard_bytes)]
    return max(sum(sizes) for sizes in copied)
