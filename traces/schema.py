"""The Trace: what one model costs on one device, layer by layer.

A trace is three tables and a header. ``layers`` has a row per layer (sizes that do not depend on the microbatch),
``times`` a row per (layer, phase, microbatch), ``sizes`` a row per (layer, microbatch). All durations are integer
nanoseconds and all sizes integer bytes. The last layer is the loss: its input is the logits, its target the labels.

Layer ``l``'s *input* is written x(l), the gradient with respect to it g(l); a layer's output is x(l + 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated

import msgspec

FORMAT = "harmony-trace"
VERSION = 1

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Provenance(Enum):
    """Where a number comes from."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    MODELLED = "modelled"
    IMPORTED = "imported"


WORST_LAST = (
    Provenance.MEASURED,
    Provenance.IMPORTED,
    Provenance.MODELLED,
    Provenance.INTERPOLATED,
    Provenance.EXTRAPOLATED,
)


def worst(provenances: Iterable[Provenance]) -> Provenance:
    """The least trustworthy of them; of none, MEASURED. Between profiled sizes counts as worse than modelled."""
    return max(provenances, key=WORST_LAST.index, default=Provenance.MEASURED)


class Phase(Enum):
    """What a duration times. ``BACKWARD`` is without recompute; updates do not depend on the microbatch.

    A backward may also be done in two parts, first the gradient of the layer's input and later those of its parameters;
    a trace need not time them.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    UPDATE_CPU = "update_cpu"
    UPDATE_GPU = "update_gpu"

    @property
    def is_update(self) -> bool:
        """True for phases whose rows have no microbatch size (it is written 0)."""
        return self in (Phase.UPDATE_CPU, Phase.UPDATE_GPU)

    @property
    def is_part(self) -> bool:
        """True for the two parts of a backward, which a trace has both or not at all."""
        return self in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every table row: immutable, named fields only."""


class TiedWeight(_Row, frozen=True):
    """A parameter that several layers share: they all name the same ``group``; the first layer that does owns it."""

    group: str
    weight_bytes: Bytes


class Layer(_Row, frozen=True):
    """Sizes of one layer that do not depend on the microbatch.

    ``weight_bytes`` and ``gradient_bytes`` count every parameter the layer uses, tied ones included (a swap moves
    them once per use). ``optimizer_state_bytes`` counts a tied parameter only in the layer that owns it.
    ``changes_buffers``: a training forward writes its buffers (BatchNorm). ``cut_sensitive``: its result depends
    on how the minibatch is cut, or on chance (BatchNorm, dropout). ``saves_output``: its backward needs its own output
    (ReLU, Tanh), which without recompute then stays with what else it saved.
    """

    name: str
    kind: str
    weight_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_state_bytes: Bytes
    buffer_bytes: Bytes = 0
    trainable: bool = True
    tied: tuple[TiedWeight, ...] = ()
    changes_buffers: bool = False
    cut_sensitive: bool = False
    saves_output: bool = False


class TimeRow(_Row, frozen=True):
    """Median duration of one phase of one layer; ``spread_ns`` is the interquartile range over the repeats."""

    layer: Index
    phase: Phase
    microbatch: Index
    duration_ns: Nanoseconds
    spread_ns: Nanoseconds = 0
    provenance: Provenance = Provenance.MEASURED


class SizeRow(_Row, frozen=True):
    """Bytes of one layer that grow with the microbatch.

    ``saved_bytes`` stay alive after the layer's forward with gradient recording (output included, input and
    parameters excluded); ``workspace_bytes`` is the peak of its forward and backward minus that (incoming and input
    gradient and the parameter gradient not yet accumulated included). ``forward_workspace_bytes`` is the peak
    of its forward *without* gradient recording (output included, input and parameters excluded).
    ``unrecomputed_workspace_bytes`` is the most that its backward alone takes, beside what the forward saved.
    ``relayed_bytes`` are those of the output that take no memory of their own: input that only passes by, or repeats.

    Of a backward in two parts, ``held_bytes`` stay alive from the first part to the second: what was saved, and the
    gradients from which those of the parameters follow (of layers without trained parameters only what was saved).
    ``parts_workspace_bytes`` is the most that either part, the forward before the first included, takes besides. None:
    the trace does not say.

    ``provenance`` is of what crosses the layer's boundaries, ``memory_provenance`` of all else (None: as well).
    """

    layer: Index
    microbatch: Count
    input_bytes: Bytes
    output_bytes: Bytes
    input_gradient_bytes: Bytes
    saved_bytes: Bytes
    workspace_bytes: Bytes
    forward_workspace_bytes: Bytes
    relayed_bytes: Bytes = 0
    unrecomputed_workspace_bytes: Bytes | None = None
    held_bytes: Bytes | None = None
    parts_workspace_bytes: Bytes | None = None
    provenance: Provenance = Provenance.MEASURED
    memory_provenance: Provenance | None = None


class Trace(_Row, frozen=True):
    """What a model costs on a device. See the module's docstring for the tables.

    ``label_bytes_per_sample`` is the target's size. ``optimizer`` names the one whose state and update were measured.
    ``sample`` says what a sample is (``1024 tokens``), ``modelled_by`` by what modelled numbers were modelled, and in
    which version; both are empty where nobody said so.
    """

    model: str
    device: str
    dtype: str
    optimizer: str
    label_bytes_per_sample: Bytes
    layers: tuple[Layer, ...]
    times: tuple[TimeRow, ...]
    sizes: tuple[SizeRow, ...]
    sample: str = ""
    modelled_by: str = ""
    framework: str = ""
    threads: int = 0
    warmups: int = 0
    repeats: int = 0

    @property
    def tied_groups(self) -> dict[str, tuple[int, ...]]:
        """Layers of each tied group, ascending; the first owns the parameter and its optimizer state."""
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for tied in layer.tied:
                groups.setdefault(tied.group, []).append(index)
        return {name: tuple(members) for name, members in groups.items()}
