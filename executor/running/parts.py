"""A backward in two parts: first the gradient of the input, later those of the parameters.

Each layer has a graph of its own, from its outputs to its inputs x. The first part runs the nodes on the ways to x, and
notes the gradients that arrive where other ways leave for parameters; the second part goes those from there::

    output ─► n3 ─► n2 ─► n1 ─► x        first part: n3, n2, n1
               │           │
               ▼           ▼
               w           v             second part: from n3 to w, and from n1 to v

So nothing is done twice, except for a parameter that is used before and after another use of it on the same way: its
gradient is made from the output on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

LeafKey = tuple[int, str]
"""A layer, and the name of a parameter in its module."""


class _Begun(NamedTuple):
    """Where a backward begins, with which gradient."""

    edge: GradientEdge
    gradient: Tensor


class _Branch(NamedTuple):
    """Where the second part begins for some parameters."""

    begun: Sequence[_Begun]
    leaves: Mapping[LeafKey, Tensor]


class WeightPart:
    """The second part of a backward that has done its first. Holds the graph and the gradients that it needs."""

    def __init__(self, branches: Iterable[_Branch] = ()) -> None:
        self._branches = list(branches)

    def extend(self, other: WeightPart) -> None:
        """Do what another one does, too."""
        self._branches += other._branches

    def add_to(self, gradients: Mapping[LeafKey, Tensor]) -> None:
        """Add to these gradients; lets go of what it held. May be called once."""
        while self._branches:
            begun, leaves = self._branches.pop()
            edges, arrived = [edge for edge, _ in begun], [each for _, each in begun]
            for key, leaf in leaves.items():
                leaf.grad = gradients[key]
            try:
                # Branches have nodes in common.
                torch.autograd.backward(edges, arrived, retain_graph=True, inputs=list(leaves.values()))
            finally:
                for leaf in leaves.values():
                    leaf.grad = None


def input_part(
    edges: Sequence[GradientEdge | None],
    x: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    leaves: Mapping[LeafKey, Tensor],
) -> tuple[list[Tensor | None], WeightPart]:
    """Go back from a layer's outputs at ``edges`` to its inputs ``x``: their gradients (None for what takes no part),
    and the second part for the ``leaves``. An output without edge or gradient takes no part."""
    begun = [
        _Begun(edge, each)
        for edge, each in zip(edges, output_gradients, strict=True)
        if edge is not None and each is not None
    ]
    if not begun:
        return [None] * len(x), WeightPart()
    following = _nodes([edge.node for edge, _ in begun])
    on_way = _before({get_gradient_edge(each).node for each in x}, following)
    beside = [each for each in begun if each.edge.node not in on_way]
    on = [each for each in begun if each.edge.node in on_way]
    keys = {get_gradient_edge(leaf).node: key for key, leaf in leaves.items()}
    starts = _starts({edge.node for edge, _ in beside}, keys, following, on_way)
    arrived: dict[Node, list[_Begun]] = {}
    for each in beside:
        arrived.setdefault(each.edge.node, []).append(each)
    gradients: Sequence[Tensor | None] = [None] * len(x)
    if on:
        noted = [node.register_prehook(_note(arrived, node)) for node in on_way & set().union(*starts)]
        try:
            gradients = torch.autograd.grad(
                [edge for edge, _ in on],
                x,
                [each for _, each in on],
                retain_graph=bool(starts),
                allow_unused=True,
            )
        finally:
            for hook in noted:
                hook.remove()
    branches = []
    for nodes, own in starts.items():
        from_here = [each for node in following if node in nodes for each in arrived.get(node, ())] if nodes else begun
        if from_here:
            branches.append(_Branch(from_here, {key: leaves[key] for key in own}))
    return list(gradients), WeightPart(branches)


def _note(arrived: dict[Node, list[_Begun]], node: Node) -> Callable[[Sequence[Tensor | None]], None]:
    def note(gradients: Sequence[Tensor | None]) -> None:
        pairs = [(GradientEdge(node, number), each) for number, each in enumerate(gradients)]
        arrived[node] = [_Begun(edge, each) for edge, each in pairs if each is not None]

    return note


_Following = Mapping[Node, Sequence[Node]]
"""The nodes of a graph, each after all those that follow it, and what follows them directly."""


def _nodes(roots: Sequence[Node]) -> _Following:
    """The graph behind some nodes."""
    following: dict[Node, Sequence[Node]] = {}
    entered: dict[Node, Sequence[Node]] = {}
    waiting = list(roots)
    while waiting:
        node = waiting[-1]
        if node not in entered:
            entered[node] = [after for after, _ in node.next_functions if after is not None]
            waiting += [after for after in entered[node] if after not in entered]
        else:
            waiting.pop()
            following.setdefault(node, entered[node])
    return following


def _before(nodes: Collection[Node], following: _Following) -> frozenset[Node]:
    """The nodes and all from which a way leads to one of them."""
    before = set(nodes)
    for each, after in following.items():
        if not before.isdisjoint(after):
            before.add(each)
    return frozenset(before)


def _starts(
    beside_roots: Collection[Node], leaves: Mapping[Node, LeafKey], following: _Following, on_way: frozenset[Node]
) -> dict[frozenset[Node], list[LeafKey]]:
    """Leaves by the nodes from which their gradients follow: by none of them those that follow from the outputs."""
    beside: dict[Node, set[LeafKey]] = {}  # leaves behind a node that is on no way
    nodes: dict[LeafKey, set[Node]] = {}
    for node, after in following.items():
        found = {leaves[node]} if node in leaves else set()
        found.update(key for each in after if each not in on_way for key in beside[each])
        if node in on_way:
            for key in found:
                nodes.setdefault(key, set()).add(node)
        else:
            beside[node] = found
    for root in beside_roots:
        for key in beside[root]:
            nodes.setdefault(key, set()).add(root)
    starts: dict[frozenset[Node], list[LeafKey]] = {}
    for key, own in nodes.items():
        in_a_row = len(own) > 1 and any(len(_before({node}, following) & own) > 1 for node in own)
        starts.setdefault(frozenset(() if in_a_row else own), []).append(key)
    return starts
