"""Random inputs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from traces.schema import Layer, Phase, Provenance, SizeRow, TiedWeight, TimeRow, Trace
from traces.synthetic import skewed_trace, with_frozen, with_tied

BIG = 2**40


@st.composite
def traces(draw: st.DrawFn, min_layers: int = 1, max_layers: int = 6) -> Trace:
    """Any valid trace: numbers that follow no line in the microbatch, tied and frozen layers, missing update rows."""
    count = draw(st.integers(min_layers, max_layers))
    amounts = st.integers(0, BIG)
    layers = draw(_layers(count))
    times = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for u in draw(_microbatches()):
            times += [_time(layer, phase, u, draw(amounts), draw(_provenances())) for layer in range(count)]
    owners = _owners(layers)
    for phase in (Phase.UPDATE_CPU, Phase.UPDATE_GPU):
        times += [
            _time(layer, phase, 0, draw(amounts), draw(_provenances())) for layer in owners if draw(st.booleans())
        ]
    sizes = []
    for u in draw(_microbatches()):
        boundaries = draw(st.lists(amounts, min_size=count + 1, max_size=count + 1))
        for layer in range(count):
            gradient, saved, workspace, forward_workspace = (draw(amounts) for _ in range(4))
            sizes.append(
                SizeRow(
                    layer=layer,
                    microbatch=u,
                    input_bytes=boundaries[layer],
                    output_bytes=boundaries[layer + 1],
                    input_gradient_bytes=gradient,
                    saved_bytes=saved,
                    workspace_bytes=workspace,
                    forward_workspace_bytes=forward_workspace,
                    provenance=draw(_provenances()),
                )
            )
    return Trace(
        model=draw(st.text(max_size=10)),
        device="device",
        dtype="float32",
        optimizer="adam",
        label_bytes_per_sample=draw(amounts),
        layers=layers,
        times=tuple(draw(st.permutations(times))),
        sizes=tuple(draw(st.permutations(sizes))),
        threads=draw(st.integers(0, 8)),
    )


@st.composite
def linear_traces(
    draw: st.DrawFn, min_layers: int = 2, max_layers: int = 7, *, tied: bool = False, frozen: bool = False
) -> Trace:
    """A trace whose sizes are proportional to the microbatch, with every update row, for building schedules from.

    ``tied``: perhaps a parameter that two or three layers share. ``frozen``: perhaps layers that are not trained.
    """
    count = draw(st.integers(min_layers, max_layers))
    trace = skewed_trace(draw(st.integers(0, 10_000)), count)
    shared: list[int] = []
    if tied and count > 2:
        shared = sorted(draw(st.sets(st.integers(0, count - 2), max_size=3)))
        if len(shared) > 1:
            trace = with_tied(trace, shared, draw(st.integers(1, 10)) * 100_000)
    if frozen:
        trace = with_frozen(trace, sorted(draw(st.sets(st.integers(0, count - 1), max_size=2)) - set(shared)))
    return trace


def _microbatches() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True)


def _provenances() -> st.SearchStrategy[Provenance]:
    return st.sampled_from((Provenance.MEASURED, Provenance.MODELLED, Provenance.IMPORTED))


def _time(layer: int, phase: Phase, u: int, duration_ns: int, provenance: Provenance) -> TimeRow:
    return TimeRow(layer=layer, phase=phase, microbatch=u, duration_ns=duration_ns, provenance=provenance)


@st.composite
def _layers(draw: st.DrawFn, count: int) -> tuple[Layer, ...]:
    groups = {
        f"group{number}": (draw(st.integers(1, BIG)), draw(st.sets(st.integers(0, count - 1), min_size=1)))
        for number in range(draw(st.integers(0, 2)))
    }
    layers = []
    for index in range(count):
        tied = tuple(
            TiedWeight(group=name, weight_bytes=size) for name, (size, users) in groups.items() if index in users
        )
        weight_bytes = sum(each.weight_bytes for each in tied) + draw(st.sampled_from((0, 0, 1, 12345)))
        trainable = draw(st.booleans())
        layers.append(
            Layer(
                name=draw(st.text(max_size=6)),
                kind="any",
                weight_bytes=weight_bytes,
                gradient_bytes=weight_bytes if trainable else 0,
                optimizer_state_bytes=2 * weight_bytes if trainable else 0,
                buffer_bytes=draw(st.integers(0, BIG)),
                trainable=trainable,
                tied=tied,
            )
        )
    return tuple(layers)


def _owners(layers: tuple[Layer, ...]) -> list[int]:
    """Layers that own trained weights, found without the code under test."""
    seen: set[str] = set()
    owners = []
    for index, layer in enumerate(layers):
        own = layer.weight_bytes - sum(tied.weight_bytes for tied in layer.tied if tied.group in seen)
        seen |= {tied.group for tied in layer.tied}
        if layer.trainable and own:
            owners.append(index)
    return owners
