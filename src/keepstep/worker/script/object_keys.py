"""Dicts whose keys are attached objects, or ids of these: `{p: 0.0}`, `{id(p): 0.0}`.

Such keys travel as names. A key that has no name and cannot be packed is known by its place, as
long as the dict has had the same keys since the script began."""

from __future__ import annotations

from typing import Any, Final

from keepstep.errors import UsageError
from keepstep.worker.script import values
from keepstep.worker.script.nodes import Graph, VariableNode

_ADDRESS_MIN: Final = 1 << 20  # smaller numbers are no ids


def names(graph: Graph, target: dict[Any, Any]) -> dict[int, str]:
    """Of keys, by their place."""
    found: dict[int, str] = {}
    ids: dict[int, str] | None = None
    for place, key in enumerate(target):
        if key.__class__ is int:
            if key < _ADDRESS_MIN:
                continue
            ids = graph.names_by_id() if ids is None else ids
            name = ids.get(key)
        else:
            name = None if key.__class__ in values.SCALARS else graph.name_of(key)
        if name is not None:
            found[place] = name
    return found


def packed(node: VariableNode, graph: Graph, named: dict[int, str], rekeyed: bool) -> list[Any]:
    """Of each entry the name, whether the key is an id, the key if it has no name, and the value.
    What cannot be packed is an empty list."""
    entries: list[Any] = []
    for place, (key, value) in enumerate(node.target.items()):
        name = named.get(place)
        told = _packed(key, node, graph) if name is None else []
        entries.append([name, key.__class__ is int, told, _packed(value, node, graph)])
    return [rekeyed, entries]


def _packed(value: Any, node: VariableNode, graph: Graph) -> list[Any]:
    try:
        return [graph.pack(value, node)]
    except values.NotPlain:
        return []


def put(target: dict[Any, Any], data: list[Any], label: str, referred: Any) -> None:
    rekeyed, entries = data
    mine = list(target)
    new: dict[Any, Any] = {}
    for place, (name, is_id, told, value) in enumerate(entries):
        if name is not None:
            key = referred.named(name)
            key = id(key) if is_id else key
        elif told:
            key = values.unpack(told[0], referred)
        elif rekeyed or len(mine) != len(entries):
            raise UsageError(
                f"{label} has got other keys, which cannot be carried to another process",
                hint="use names or numbers as keys",
            )
        else:
            key = mine[place]
        if value:
            new[key] = values.unpack(value[0], referred)
        elif key in target:
            new[key] = target[key]
    target.clear()
    target.update(new)
