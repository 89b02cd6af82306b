"""Steps of plain schedules on one GPU: one layer on one microbatch, or one layer's update, and what each touches.

x(l) is the input of layer l: data for layer 0, and for the others both the output of layer l - 1 and the stash that
layer l's backward starts from; x(L), past the last layer, are the labels. g(l) is the gradient with respect to x(l).
Without recompute the forward of layer l also leaves s(l), what autograd saved besides input and output. All belong to a
microbatch. Tensors of no bytes are left out.

A GPU of a pipeline has only some layers. What its first layer takes in and its last one gives on, and the other way
in backward, comes from and goes to its neighbours. Tied weights may have users on several GPUs: each sends its partial
gradient home after its last backward, and drops its copy of the weights; the owner's update takes them from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.costs import Costs

from ..plan import Pack
from ..schedule import Interval, TaskKind, TensorKind
from .paging import Event, Home, PagedStep, Tensor


class PlainSteps:
    """Makes the steps of one GPU that has the ``layers`` and these microbatches, each step once.

    Steps are asked for in the order in which they are played: a layer's first backward creates its gradient, its last
    one completes it.
    """

    def __init__(self, costs: Costs, microbatches: Sequence[Interval], layers: Pack, *, recompute: bool) -> None:
        self._costs, self._recompute = costs, recompute
        self._microbatches = microbatches
        self._first, self._end = layers
        self._last = costs.layer_count - 1
        self._owners, self._weight_homes = _tied_owners(costs), _weight_homes(costs)
        self._last_updates = _last_updates(costs)
        self._state: dict[Home, Tensor] = {}
        own, all_of_them = self.layers, range(len(microbatches))
        around = range(own.start, own.stop + 1)
        self._inputs = [{layer: self._input(layer, m) for layer in around} for m in all_of_them]
        self._input_gradients = [{layer: self._input_gradient(layer, m) for layer in around} for m in all_of_them]
        self._saved = [{layer: self._remainder(layer, m) for layer in own} for m in all_of_them]
        self._backwards = dict.fromkeys(own, 0)

    @property
    def layers(self) -> range:
        """The layers of the GPU."""
        return range(self._first, self._end + 1)

    @property
    def updated(self) -> list[int]:
        """Those of them that have something to update."""
        return [layer for layer in self.layers if self._costs.updates(layer)]

    def forward(self, layer: int, microbatch: int) -> PagedStep:
        """From x(l) to x(l + 1). The last layer, the loss, reads the labels and hands them on to its backward."""
        x, following = self._inputs[microbatch][layer], self._inputs[microbatch][layer + 1]
        saved = self._saved[microbatch][layer]
        weight, buffer = self._weight(layer), self._buffer(layer)
        return PagedStep(
            kind=TaskKind.FORWARD,
            layer=layer,
            samples=self._microbatches[microbatch],
            microbatch=microbatch,
            touches=_sized(weight, buffer, x, following, saved),
            creates=_sized(following, saved) if layer < self._last else _sized(saved),
            changes=_sized(buffer) if self._costs.trace.layers[layer].changes_buffers else (),
            hands_on=_sized(following),
            receives=_passed(x),
            sends=_passed(following),
            workspace_bytes=self._costs.forward_workspace_bytes(layer, layer, self._size(microbatch)),
        )

    def backward(self, layer: int, microbatch: int) -> PagedStep:
        """With recompute, the forward again from x(l); then from g(l + 1) to g(l), adding to the layer's gradient."""
        u = self._size(microbatch)
        x, saved = self._inputs[microbatch][layer], self._saved[microbatch][layer]
        labels = (self._inputs[microbatch][layer + 1],) if layer == self._last else ()
        out, incoming = self._input_gradients[microbatch][layer], self._input_gradients[microbatch][layer + 1]
        weight, gradient = self._weight(layer), self._gradient(layer)
        self._backwards[layer] += 1
        is_first, is_last = self._backwards[layer] == 1, self._backwards[layer] == len(self._microbatches)
        lends = is_last and self._owner_is_elsewhere(layer)
        return PagedStep(
            kind=TaskKind.BACKWARD,
            layer=layer,
            samples=self._microbatches[microbatch],
            microbatch=microbatch,
            touches=_sized(weight, self._buffer(layer), x, *labels, saved, gradient, incoming, out),
            creates=_sized(gradient, out) if is_first else _sized(out),
            changes=() if is_first else _sized(gradient),
            dies=_sized(x, *labels, saved, incoming),
            hands_on=_sized(out),
            goes_out=_sized(gradient) if lends else (),
            stale=_sized(weight) if lends else (),
            receives=_passed(incoming),
            sends=_passed(out),
            signals=(Event("gradient", layer),) if lends else (),
            completes=gradient if is_last and gradient.bytes and self._has_whole_model else None,
            recompute=self._recompute,
            workspace_bytes=self._costs.backward_workspace_bytes(layer, layer, u)
            if self._recompute
            else self._costs.unrecomputed_workspace_bytes(layer, u),
        )

    def update(self, layer: int) -> PagedStep:
        """The weights that the layer owns, from all partial gradients of them.

        Other layers' copies of its tied weights become stale. Those that are updated later bring these weights in
        again, as a part of theirs, and write them back with the rest; so they go out at once.
        """
        partners = self._costs.tied_partners(layer)
        users = sorted((layer, *partners))
        weight = self._weight(layer)
        owners = sorted({owner for owner in self._owners[layer] if owner != layer and not self._has(owner)})
        return PagedStep(
            kind=TaskKind.UPDATE,
            layer=layer,
            touches=_sized(weight, *map(self._gradient, users), self._optimizer_state(layer)),
            changes=_sized(weight, self._optimizer_state(layer)),
            dies=_sized(*(self._gradient(user) for user in users if self._last_updates[user] == layer)),
            stale=_sized(*(self._weight(partner) for partner in partners)),
            goes_out=_sized(weight) if any(map(self._costs.updates, partners)) else (),
            awaits=(
                *(Event("gradient", user) for user in users if not self._has(user)),
                *(Event("weight", owner) for owner in owners),
            ),
            signals=(Event("weight", layer),) if partners else (),
        )

    @property
    def _has_whole_model(self) -> bool:
        return self._first == 0 and self._end == self._last

    def _has(self, layer: int) -> bool:
        return self._first <= layer <= self._end

    def _is_passed(self, layer: int) -> bool:
        """Whether x(layer) and g(layer) pass between this GPU and a neighbour."""
        return (layer == self._first and layer > 0) or (layer == self._end + 1 and layer <= self._last)

    def _owner_is_elsewhere(self, layer: int) -> bool:
        return any(not self._has(owner) for owner in self._owners[layer])

    def _weight(self, layer: int) -> Tensor:
        """Layers joined by tied weights have a place in the store in common."""
        home = Home(TensorKind.WEIGHT, self._weight_homes[layer])
        return self._of_layer(home, layer, self._costs.weight_bytes(layer, layer))

    def _buffer(self, layer: int) -> Tensor:
        return self._of_layer(Home(TensorKind.BUFFER, layer), layer, self._costs.buffer_bytes(layer, layer))

    def _gradient(self, layer: int) -> Tensor:
        return self._of_layer(Home(TensorKind.GRADIENT, layer), layer, self._costs.gradient_bytes(layer, layer))

    def _optimizer_state(self, layer: int) -> Tensor:
        size = self._costs.optimizer_state_bytes(layer, layer)
        return self._of_layer(Home(TensorKind.OPTIMIZER_STATE, layer), layer, size)

    def _input(self, layer: int, microbatch: int) -> Tensor:
        """x(layer) of a microbatch: what the next GPU takes is of no more use here."""
        u = self._size(microbatch)
        if layer > self._last:
            return self._of_microbatch(TensorKind.DATA, layer, self._costs.label_bytes(u), microbatch)
        is_output = layer > self._end
        kind = TensorKind.DATA if layer == 0 else TensorKind.ACTIVATION if is_output else TensorKind.STASH
        passage = Event("x", layer, microbatch)
        return self._of_microbatch(kind, layer, self._costs.input_bytes(layer, u), microbatch, passage)

    def _input_gradient(self, layer: int, microbatch: int) -> Tensor:
        """g(layer) of a microbatch. Nobody needs g(0), and nothing comes in to the loss: they have no bytes."""
        size = self._costs.input_gradient_bytes(layer, self._size(microbatch)) if 0 < layer <= self._last else 0
        passage = Event("g", layer, microbatch)
        return self._of_microbatch(TensorKind.ACTIVATION_GRADIENT, layer, size, microbatch, passage)

    def _remainder(self, layer: int, microbatch: int) -> Tensor:
        """s(layer) of a microbatch; of no bytes with recompute."""
        size = 0 if self._recompute else self._costs.remainder_bytes(layer, self._size(microbatch))
        return self._of_microbatch(TensorKind.STASH, layer, size, microbatch, is_saved=True)

    def _size(self, microbatch: int) -> int:
        start, stop = self._microbatches[microbatch]
        return stop - start

    def _of_microbatch(
        self,
        kind: TensorKind,
        layer: int,
        size: int,
        microbatch: int,
        passage: Event | None = None,
        *,
        is_saved: bool = False,
    ) -> Tensor:
        """Only data have a place in the store; only what is passed keeps its ``passage``."""
        samples = self._microbatches[microbatch]
        return Tensor(
            kind=kind,
            layer=layer,
            bytes=size,
            home=Home(kind, layer, samples) if kind is TensorKind.DATA else None,
            is_saved=is_saved,
            passage=passage if self._is_passed(layer) else None,
            samples=samples,
            microbatch=microbatch,
        )

    def _of_layer(self, home: Home, layer: int, size: int) -> Tensor:
        """A layer's weights, say: one tensor, however often it is asked for."""
        key = home._replace(layer=layer)
        if key not in self._state:
            self._state[key] = Tensor(kind=home.kind, layer=layer, bytes=size, home=home)
        return self._state[key]


def _sized(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in tensors if tensor.bytes])


def _passed(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.passage and tensor.bytes else None


def _tied_owners(costs: Costs) -> list[frozenset[int]]:
    """For each layer the owners of the trained tied weights that it uses."""
    groups = costs.trace.tied_groups
    owners = [frozenset(groups[tied.group][0] for tied in layer.tied) for layer in costs.trace.layers]
    return [frozenset(filter(costs.updates, each)) for each in owners]


def _weight_homes(costs: Costs) -> list[int]:
    """For each layer a layer that is the same for all that are joined by tied weights."""
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
