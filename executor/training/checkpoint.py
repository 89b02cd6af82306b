"""Checkpoints: a folder with all that training needs to go on, bit for bit, in another process or by another plan.

=====================  ================================================================================================
``model.safetensors``  weights and buffers by the names of the model's ``state_dict``; tied ones once, under the first
                       name. Several files with an index from ``shard_bytes`` on, as transformers reads them
``config.json``        the model's configuration, if it has one as models of transformers do
``optimizer.…``        tensors of the optimizer's state, of schedulers and extras, likewise
``training.json``      the rest; tensors of the optimizer's state go by the names of their parameters
=====================  ================================================================================================

Random layers draw from (seed, step, layer, first sample), so seed and step say what they draw next; no generator has a
state that counts. A run that goes on by another plan draws the same while microbatches start at the same samples. Where
it adds the same microbatches in the same order, its results are the same bit for bit; else they differ by rounding.

Nothing is unpickled. A folder is written under a hidden name, and renamed when all of it is on the disk: see
``folders.py``. Sizes of files, shapes, dtypes and names are checked before anything is loaded; the values are not.
"""

from __future__ import annotations

import copy
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traces.errors import FileError
from traces.files import refusals_of

from ..errors import CheckpointError
from .folders import readable, replaced
from .optimizer_state import DifferentOptimizer, OptimizerRecord, Restored, kind_of, record_optimizer
from .plain_values import CannotBeStored, Find, decode, encode
from .tensor_files import TensorFiles, TensorTable, memory_of_copies, unwritable, write_tensors

FORMAT, VERSION = "harmony-checkpoint", 1
SHARD_BYTES = 5 * 10**9
_MODEL, _OPTIMIZER, _TRAINING = "model", "optimizer", "training.json"


@dataclass(frozen=True)
class Position:
    """Where training stands: after ``step`` steps, with dropout drawn from ``seed``.

    ``data`` says where the data goes on, ``extras`` are the user's own; both of numbers, texts, None, lists, tuples,
    dictionaries and tensors.
    """

    step: int = 0
    seed: int = 0
    data: Any = None
    extras: Any = None


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int


class _Scheduler(msgspec.Struct, frozen=True):
    kind: str
    state: Any


class _Training(msgspec.Struct, frozen=True):
    """What ``training.json`` says. ``files`` has the bytes of each file beside it."""

    format: str
    version: int
    identity: str
    step: int
    seed: int
    data: Any
    extras: Any
    schedulers: list[_Scheduler]
    optimizer: OptimizerRecord | None
    random_state: Any
    files: dict[str, int]


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    schedulers: Sequence[Any] = (),
    position: Position = Position(),
    *,
    shard_bytes: int = SHARD_BYTES,
    random_state: bool = False,
) -> Path:
    """Write a checkpoint; one that is there is replaced as a whole, with whatever else lies in its folder.

    After a Session's ``write_home()``, if its plan keeps anything on GPUs. ``random_state`` saves the global generators
    of Python and torch too. Returns the folder. Raises CheckpointError for a folder that is something else, or what
    cannot be stored; FileError if the system refuses (no room, say), and then the old checkpoint is still there.
    """
    target = Path(folder).resolve()
    _check_replaceable(target)
    weights, others = _weights(model, str(folder)), TensorTable()
    identity = secrets.token_hex(8)
    try:
        training = _Training(
            format=FORMAT,
            version=VERSION,
            identity=identity,
            step=position.step,
            seed=position.seed,
            data=encode(position.data, "data", others),
            extras=encode(position.extras, "extras", others),
            schedulers=[
                _Scheduler(kind_of(each), encode(each.state_dict(), f"scheduler {number}", others))
                for number, each in enumerate(schedulers)
            ],
            optimizer=None if optimizer is None else record_optimizer(optimizer, model, others),
            random_state=encode(_random_state(), "random state", others) if random_state else None,
            files={},
        )
    except CannotBeStored as error:
        raise CheckpointError(str(folder), f"cannot be written: {error}") from error
    try:
        with refusals_of(target), replaced(target) as new:
            write_tensors(new, _MODEL, weights.tensors, shard_bytes, identity)
            write_tensors(new, _OPTIMIZER, others.tensors, shard_bytes, identity)
            _write_configuration(new, model)
            files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            encoded = msgspec.json.encode(msgspec.structs.replace(training, files=files))
            (new / _TRAINING).write_bytes(msgspec.json.format(encoded, indent=1))
    except FileError as error:
        raise FileError(str(folder), f"{error.problem}; nothing was changed") from error
    return target


def load(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, schedulers: Sequence[Any] = ()
) -> Position:
    """Bring a model, its optimizer and its schedulers to where a checkpoint was written, and say where that is.

    They are of the same classes as those that were saved, with the same tensors; the groups of the optimizer may have
    another order. Without ``optimizer`` only the weights are loaded. Before a Session is made of them, which takes them
    over as they are then. Raises CheckpointError, before anything is changed, for a checkpoint that is not whole, or
    does not belong to them.
    """
    place = readable(Path(folder).resolve())
    training = _read(place)
    files, others = (TensorFiles(place, stem, training.identity) for stem in (_MODEL, _OPTIMIZER))
    _check_weights(place, files, _weights(model, str(place)))
    found = _Found(place, others)
    restored = None if optimizer is None else _restored(place, training, optimizer, model, found, schedulers)
    states = [decode(each.state, found) for each in training.schedulers]
    position = Position(training.step, training.seed, decode(training.data, found), decode(training.extras, found))
    generators = decode(training.random_state, found)
    model.load_state_dict({name: files[name] for name in files}, strict=False)
    if restored is not None:
        restored.apply()
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
    if generators is not None:
        _set_random_state(generators)
    return position


def is_whole(folder: str | Path) -> bool:
    """Whether :func:`check` finds nothing wrong."""
    try:
        check(folder)
    except CheckpointError:
        return False
    return True


def check(folder: str | Path) -> None:
    """Raises CheckpointError unless a checkpoint is there with all its files, each of its full size and its own."""
    place = readable(Path(folder).resolve())
    training = _read(place)
    for stem in (_MODEL, _OPTIMIZER):
        TensorFiles(place, stem, training.identity)


def peak_bytes(model: nn.Module, optimizer: Optimizer | None = None, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Host memory in bytes that :func:`save` takes for tensors, beyond those that are there.

    Tensors are written from where they lie; only those that are not contiguous or not in host memory are copied, of one
    file at a time.
    """
    others = TensorTable()
    if optimizer is not None:
        record_optimizer(optimizer, model, others)
    return max(memory_of_copies(tensors, shard_bytes) for tensors in (_weights(model, "").tensors, others.tensors))


class _Found:
    """The tensors of ``files`` in memory, each once, by name."""

    def __init__(self, place: Path, files: TensorFiles) -> None:
        self._place, self._files = place, files
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._tensors:
            if name not in self._files:
                raise CheckpointError(str(self._place), f"is damaged: no file has its tensor {name!r}")
            self._tensors[name] = self._files[name].clone()  # not mapped: files may go while training goes on
        return self._tensors[name]


def _restored(
    place: Path, training: _Training, optimizer: Optimizer, model: nn.Module, found: Find, schedulers: Sequence[Any]
) -> Restored:
    """The optimizer's past, checked with that of its schedulers."""
    if training.optimizer is None:
        raise CheckpointError(str(place), "has no optimizer's state: it was written without an optimizer")
    kinds, saved = [kind_of(each) for each in schedulers], [each.kind for each in training.schedulers]
    if kinds != saved:
        raise CheckpointError(
            str(place), f"was written with the schedulers {saved or 'none'}, these are {kinds or 'none'}"
        )
    try:
        return Restored(training.optimizer, optimizer, model, found, in_order=bool(schedulers))
    except (DifferentOptimizer, CannotBeStored) as error:
        raise CheckpointError(str(place), str(error)) from error


def _weights(model: nn.Module, path: str) -> TensorTable:
    """The model's tensors by the names of its ``state_dict``, tied ones once."""
    weights = TensorTable()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(path, f"cannot hold {name} of the model, which is no tensor: put it into the extras")
        if problem := unwritable(value):
            raise CheckpointError(path, f"cannot hold {name} of the model, which {problem}")
        weights.add(name, value)
    return weights


def _check_weights(place: Path, files: TensorFiles, weights: TensorTable) -> None:
    """The files have the model's tensors, of its shapes and dtypes."""
    own, saved = weights.tensors.keys(), set(files)
    if own != saved:
        name = min(own ^ saved)
        has, lacks = ("this model", "the checkpoint") if name in own else ("the checkpoint", "this model")
        raise CheckpointError(str(place), f"is of another model: {has} has {name}, {lacks} does not")
    for name, tensor in weights.tensors.items():
        found = files[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                str(place),
                f"is of another model: there {name} is {found.dtype} {tuple(found.shape)}, in this model it is "
                f"{tensor.dtype} {tuple(tensor.shape)}",
            )


def _check_replaceable(target: Path) -> None:
    """What is there is a checkpoint, or nothing."""
    if target.exists() and not (target / _TRAINING).exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(str(target), "is there already, and no checkpoint; choose another name")


def _read(place: Path) -> _Training:
    """``training.json``, after a look at its version and at the sizes of the files beside it."""
    path = place / _TRAINING
    try:
        data = path.read_bytes()
        header = msgspec.json.decode(data, type=_Header)
        if (header.format, header.version) != (FORMAT, VERSION):
            raise CheckpointError(
                str(path),
                f"is {header.format} of version {header.version}; this version of Harmony reads {FORMAT} of version "
                f"{VERSION}",
            )
        training = msgspec.json.decode(data, type=_Training)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(str(path), f"is damaged: {error}") from error
    for name, size in training.files.items():
        try:
            found = (place / name).stat().st_size
        except OSError:
            raise CheckpointError(str(place / name), "is missing") from None
        if found != size:
            raise CheckpointError(str(place / name), f"is damaged: it has {found} B, it was written with {size} B")
    return training


def _write_configuration(folder: Path, model: nn.Module) -> None:
    """What transformers reads beside the weights, if the model has it."""
    configuration = getattr(model, "config", None)
    if configuration is not None and hasattr(configuration, "save_pretrained"):
        configuration = copy.deepcopy(configuration)
        configuration.architectures = [type(model).__name__]
        configuration.dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
        configuration.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _random_state() -> dict[str, Any]:
    """The global generators of Python and torch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
