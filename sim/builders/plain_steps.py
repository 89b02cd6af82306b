"""Steps of plain schedules on one GPU: one layer on one microbatch, or one layer's update, and what each touches.

x(l) is the input of layer l: data for layer 0, and for the others both the output of layer l - 1 and the stash from
which layer l's backward repeats its forward; x(L), past the last layer, are the labels. g(l) is the gradient with
respect to x(l). Both belong to a microbatch. Tensors of no bytes are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from traces.costs import Costs

from ..schedule import Interval, TaskKind, TensorKind
from .paging import PagedStep, Tensor


class PlainSteps:
    """Makes the steps of one GPU that has all layers and these microbatches, each step once.

    Steps are asked for in the order in which they are played: a layer's first backward creates its gradient, its last
    one completes it.
    """

    def __init__(self, costs: Costs, microbatches: Sequence[Interval]) -> None:
        self._costs = costs
        self._microbatches = microbatches
        self._last = costs.layer_count - 1
        self._homes = costs.layer_count  # the first ones are the weights'
        self._weights = [
            Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=costs.weight_bytes(layer, layer), home=home)
            for layer, home in enumerate(_weight_homes(costs))
        ]
        self._buffers = self._state(TensorKind.BUFFER, costs.buffer_bytes)
        self._gradients = self._state(TensorKind.GRADIENT, costs.gradient_bytes)
        self._optimizer_states = self._state(TensorKind.OPTIMIZER_STATE, costs.optimizer_state_bytes)
        self._last_updates = _last_updates(costs)
        self._inputs = [self._inputs_of(index) for index in range(len(microbatches))]
        self._input_gradients = [self._input_gradients_of(index) for index in range(len(microbatches))]
        self._backwards = [0] * costs.layer_count

    def forward(self, layer: int, microbatch: int) -> PagedStep:
        """From x(l) to x(l + 1). The last layer, the loss, reads the labels and hands them on to its backward."""
        samples = self._microbatches[microbatch]
        x, following = self._inputs[microbatch][layer : layer + 2]
        buffer = self._buffers[layer]
        return PagedStep(
            kind=TaskKind.FORWARD,
            layer=layer,
            samples=samples,
            microbatch=microbatch,
            touches=_sized(self._weights[layer], buffer, x, following),
            creates=_sized(following) if layer < self._last else (),
            changes=_sized(buffer) if self._costs.trace.layers[layer].changes_buffers else (),
            hands_on=_sized(following),
            workspace_bytes=self._costs.forward_workspace_bytes(layer, layer, samples[1] - samples[0]),
        )

    def backward(self, layer: int, microbatch: int) -> PagedStep:
        """The forward again from x(l); then from g(l + 1) to g(l), adding to the layer's gradient."""
        samples = self._microbatches[microbatch]
        x, following = self._inputs[microbatch][layer : layer + 2]
        labels = (following,) if layer == self._last else ()
        out, incoming = self._input_gradients[microbatch][layer : layer + 2]
        gradient = self._gradients[layer]
        self._backwards[layer] += 1
        is_first, is_last = self._backwards[layer] == 1, self._backwards[layer] == len(self._microbatches)
        return PagedStep(
            kind=TaskKind.BACKWARD,
            layer=layer,
            samples=samples,
            microbatch=microbatch,
            touches=_sized(self._weights[layer], self._buffers[layer], x, *labels, gradient, incoming, out),
            creates=_sized(gradient, out) if is_first else _sized(out),
            changes=() if is_first else _sized(gradient),
            dies=_sized(x, *labels, incoming),
            hands_on=_sized(out),
            completes=gradient if is_last and gradient.bytes else None,
            workspace_bytes=self._costs.backward_workspace_bytes(layer, layer, samples[1] - samples[0]),
        )

    def update(self, layer: int) -> PagedStep:
        """The weights that the layer owns, from all partial gradients of them.

        Other layers' copies of its tied weights become stale. Those that are updated later bring these weights in
        again, as a part of theirs, and write them back with the rest; so they go out at once.
        """
        partners = self._costs.tied_partners(layer)
        users = sorted((layer, *partners))
        weight, state = self._weights[layer], self._optimizer_states[layer]
        return PagedStep(
            kind=TaskKind.UPDATE,
            layer=layer,
            touches=_sized(weight, *(self._gradients[user] for user in users), state),
            changes=_sized(weight, state),
            dies=_sized(*(self._gradients[user] for user in users if self._last_updates[user] == layer)),
            stale=_sized(*(self._weights[partner] for partner in partners)),
            goes_out=_sized(weight) if any(map(self._costs.updates, partners)) else (),
        )

    def _state(self, kind: TensorKind, size: Callable[[int, int], int]) -> list[Tensor]:
        layers = range(self._costs.layer_count)
        return [Tensor(kind=kind, layer=at, bytes=size(at, at), home=self._next_home()) for at in layers]

    def _next_home(self) -> int:
        self._homes += 1
        return self._homes - 1

    def _inputs_of(self, microbatch: int) -> list[Tensor]:
        """x(0) … x(L) of a microbatch."""
        samples = self._microbatches[microbatch]
        u = samples[1] - samples[0]
        past_last = self._last + 1
        sizes = [self._costs.input_bytes(layer, u) for layer in range(past_last)]
        return [
            Tensor(
                kind=TensorKind.DATA if layer in (0, past_last) else TensorKind.STASH,
                layer=layer,
                bytes=size,
                home=self._next_home() if layer in (0, past_last) else None,
                samples=samples,
                microbatch=microbatch,
            )
            for layer, size in enumerate([*sizes, self._costs.label_bytes(u)])
        ]

    def _input_gradients_of(self, microbatch: int) -> list[Tensor]:
        """g(0) … g(L) of a microbatch. Nobody needs g(0), and nothing comes in to the loss: they have no bytes."""
        samples = self._microbatches[microbatch]
        u = samples[1] - samples[0]
        inner = [self._costs.input_gradient_bytes(layer, u) for layer in range(1, self._last + 1)]
        return [
            Tensor(kind=TensorKind.ACTIVATION_GRADIENT, layer=layer, bytes=size, samples=samples, microbatch=microbatch)
            for layer, size in enumerate([0, *inner, 0])
        ]


def _sized(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in tensors if tensor.bytes])


def _weight_homes(costs: Costs) -> list[int]:
    """For each layer a number that is the same for layers joined by tied weights."""
    homes = list(range(costs.layer_count))
    for members in costs.trace.tied_groups.values():
        joined = {homes[member] for member in members}
        homes = [min(joined) if home in joined else home for home in homes]
    return homes


def _last_updates(costs: Costs) -> list[int | None]:
    """For each layer, the last layer whose update takes its gradient."""
    last: list[int | None] = [None] * costs.layer_count
    for layer in range(costs.layer_count):
        if costs.updates(layer):
            for user in (layer, *costs.tied_partners(layer)):
                last[user] = layer
    return last
