"""Traces whose byte counts cannot be mistaken for one another."""

from traces.schema import Layer, Phase, SizeRow, TimeRow, Trace

LABEL = 8
"""Label bytes of a sample."""


def odd_trace(layers: int, *, changes_buffers: frozenset[int] = frozenset()) -> Trace:
    """A trace all of whose sizes are different primes, or multiples of them by the microbatch."""
    primes = (n for n in range(11, 10**6) if all(n % d for d in range(2, int(n**0.5) + 1)))
    boundaries = [next(primes) for _ in range(layers + 1)]
    rows = tuple(
        Layer(
            name=f"layer{at}",
            kind="odd",
            weight_bytes=next(primes),
            gradient_bytes=next(primes),
            optimizer_state_bytes=next(primes),
            buffer_bytes=next(primes),
            changes_buffers=at in changes_buffers,
        )
        for at in range(layers)
    )
    per_sample = [[next(primes) for _ in range(4)] for _ in range(layers)]
    sizes = tuple(
        SizeRow(
            layer=at,
            microbatch=u,
            input_bytes=boundaries[at] * u,
            output_bytes=boundaries[at + 1] * u,
            input_gradient_bytes=per_sample[at][0] * u,
            saved_bytes=per_sample[at][1] * u,
            workspace_bytes=per_sample[at][2] * u,
            forward_workspace_bytes=per_sample[at][3] * u,
        )
        for at in range(layers)
        for u in (1, 16)
    )
    passes = [(phase, u) for phase in (Phase.FORWARD, Phase.BACKWARD) for u in (1, 16)]
    times = tuple(
        TimeRow(layer=at, phase=phase, microbatch=u, duration_ns=1)
        for at in range(layers)
        for phase, u in [*passes, (Phase.UPDATE_GPU, 0)]
    )
    return Trace(
        model="odd",
        device="none",
        dtype="float32",
        optimizer="adam",
        label_bytes_per_sample=LABEL,
        layers=rows,
        times=times,
        sizes=sizes,
    )
