"""What a model's forward does around its units, written down while it runs.

A copy of the model runs on stand-ins that have shapes and no values, for several numbers of samples: what differs
between the runs follows the number of samples. Whatever the forward does that depends on more than shapes is refused,
as a transcript would repeat it for every batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import ModelError
from .blocks import Unit
from .inputs import Inputs
from .program import Call, Made, Size
from .watching import watch

SAMPLES = (2, 3, 1)
"""How many samples the runs take. (One is a case of its own: dimensions of 1 are squeezed and broadcast.)"""


@dataclass(frozen=True)
class ValueInfo:
    """A value of a transcript: its shape for each number of :data:`SAMPLES`, and where it was made (for messages).

    ``gradient``: autograd follows it. ``call``: the index of the call that makes it, None for an input.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    gradient: bool
    call: int | None
    place: str

    @property
    def samples(self) -> int | None:
        """The dimension that is the samples; None if its shape does not follow their number.

        Raises ModelError if more than one does, or one does in another way than being their number.
        """
        if len({len(shape) for shape in self.shapes}) == 1:
            sizes = list(zip(*self.shapes, strict=True))  # by dimension
            varying = [dimension for dimension, of in enumerate(sizes) if len(set(of)) > 1]
            if not varying:
                return None
            if len(varying) == 1 and sizes[varying[0]] == SAMPLES:
                return varying[0]
        shapes = ", ".join(f"{tuple(shape)} for {n}" for shape, n in zip(self.shapes, SAMPLES, strict=True))
        raise ModelError(
            f"a value made by {self.place} is needed in a later layer, but none of its dimensions is the number of "
            f"samples ({shapes} sample(s)), so it cannot be cut into microbatches; keep the samples a dimension"
        )


@dataclass(frozen=True)
class Transcript:
    """A model's forward: ``calls`` in order, whose string targets name modules of the model, and its ``values``.

    ``inputs`` and ``output`` number the values that come in and the logits. ``constants`` are tensors that the model
    holds without registering them.
    """

    calls: tuple[Call, ...]
    values: tuple[ValueInfo, ...]
    inputs: tuple[int, ...]
    output: int
    constants: dict[str, Tensor]


def transcribe(model: nn.Module, units: Sequence[Unit], inputs: Inputs) -> Transcript:
    """Write down the forward of ``model`` on stand-ins like ``inputs``. The model itself is neither changed nor run.

    Raises ModelError with the place for a forward that a transcript would not repeat faithfully.
    """
    try:
        runs = watch(model, units, inputs, SAMPLES, nullcontext(), "meta")
    except ModelError:
        # Libraries that would look at values take another way when they see that they are traced.
        with _quiet():
            runs = watch(model, units, inputs, SAMPLES, FakeTensorMode(allow_non_fake_inputs=True), "cpu")
    first = runs[0]
    calls = []
    for index, same in enumerate(zip_longest(*(run.calls for run in runs))):
        place = first.places[index] if index < len(first.calls) else "its end"
        for call, samples in zip(same, SAMPLES, strict=True):
            if not _alike(same[0], call):
                raise ModelError(
                    f"the model's forward does something else for {SAMPLES[0]} samples than for {samples}, at {place}; "
                    "microbatches differ in size, so it must not look at how many samples there are"
                )
        args = _merged([call.args for call in same], place)
        calls.append(replace(same[0], args=args, kwargs=_merged([call.kwargs for call in same], place)))
    values = tuple(
        ValueInfo(tuple(run.infos[number].shape for run in runs), *info[1:]) for number, info in enumerate(first.infos)
    )
    return Transcript(tuple(calls), values, first.inputs, first.output, first.constants)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch would log of an operator that fails is in the error as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _alike(call: Call | None, other: Call | None) -> bool:
    if call is None or other is None:
        return call is other
    return replace(call, args=(), kwargs=()) == replace(other, args=(), kwargs=())


def _merged(forms: Sequence[Any], place: str) -> Any:
    """One template from those of the runs: integers that differ follow the number of samples."""
    first = forms[0]
    match first:
        case Made(kind, parts) if all(isinstance(f, Made) and len(f.parts) == len(parts) for f in forms):
            return Made(kind, tuple(_merged(same, place) for same in zip(*(f.parts for f in forms), strict=True)))
        case tuple() if all(isinstance(f, tuple) and len(f) == len(first) for f in forms):
            return tuple(_merged(same, place) for same in zip(*forms, strict=True))
    if all(type(form) is type(first) and form == first for form in forms):
        return first
    if all(type(form) is int for form in forms):
        times, rest = divmod(forms[1] - forms[0], SAMPLES[1] - SAMPLES[0])
        size = Size(times, forms[0] - times * SAMPLES[0])
        if not rest and all(size.times * n + size.plus == form for n, form in zip(SAMPLES, forms, strict=True)):
            return size
    raise ModelError(
        f"at {place} the model's forward uses {', '.join(map(repr, forms))} for {SAMPLES} samples; a transcript cannot "
        "tell what it would use for others"
    )
