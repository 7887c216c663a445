"""Names what a step function reads, that changes from step to step, and that no newcomer gets.

What a step reads is seen in its code: names of globals, of closures, and of attributes, also in
the script's functions that it calls by name. Whether it changes is seen by the nodes (nodes.py):
a name that is bound to other opaque values again and again, a container that is too large or holds
opaque things and changes, an object of a library whose attributes change. Named are also

    left out     containers, tensors and arrays of a registered object that change and that its
                 state_dict does not have
    unseen       a queue, a masked array and the like, which are not looked into
    the clock    a comparison that depends on time.time, perf_counter or monotonic: another process
                 decides otherwise
    the place    the host's name or LOCAL_RANK, read inside the step: they belong to the slot

All of it is a warning: reading such a thing does harm only if numbers depend on it.
"""

from __future__ import annotations

import dis
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from keepstep.worker.script import frames
from keepstep.worker.script.contents import Items
from keepstep.worker.script.namespaces import Names
from keepstep.worker.script.nodes import Graph
from keepstep.worker.script.torch_names import RegisteredNames

STEPS_MIN: Final = 4  # before anything is said
REBOUND_MIN: Final = 2
CALLS_DEPTH_MAX: Final = 3
_CLOCKS: Final = frozenset(
    {"time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns"}
)
_CLOCK_CALLS: Final = _CLOCKS - {"time"}
_PLACES: Final = frozenset({"gethostname", "getfqdn", "uname"})


class Witness:
    def __init__(self) -> None:
        self._functions: dict[CodeType, Any] = {}
        self._steps = 0
        self._reads: dict[CodeType, frozenset[str]] = {}
        self._told: set[str] = set()

    def begins(self, function: Any) -> None:
        self._steps += 1
        inner = function.__func__ if isinstance(function, MethodType) else function
        code = getattr(inner, "__code__", None)
        if code is not None and code not in self._functions:
            self._functions[code] = inner

    def unknown(self, graph: Graph) -> list[str]:
        """Each once."""
        if self._steps < STEPS_MIN:
            return []
        found: list[str] = []
        for code, function in self._functions.items():
            codes = _reached(function)
            names = frozenset().union(*(_names(each) for each in codes))
            found += self._variables(graph, names, code)
            for each in codes:
                found += _clock(each) + _place(each)
        for node in graph.nodes.values():
            if isinstance(node, RegisteredNames):
                found += [_left_out(node, name) for name in node.left_out()]
        new = [text for text in dict.fromkeys(found) if text not in self._told]
        self._told.update(new)
        return new

    def _variables(self, graph: Graph, names: frozenset[str], code: CodeType) -> list[str]:
        found: list[str] = []
        unseen: set[int] = set()  # one thing may have a name in several places
        rebound: set[tuple[str, int]] = set()
        spaces = [n for n in (*graph.nodes.values(), *graph.roots.values()) if isinstance(n, Names)]
        for space in spaces:
            for name in names & space.lost.keys():
                # A tensor that every step computes anew, as a loss is, is no state.
                cell = name, space.address(name)
                if (
                    space.lost[name] >= REBOUND_MIN
                    and space.opaque.get(name) != "result"
                    and cell not in rebound
                ):
                    rebound.add(cell)
                    found.append(_say(space, name, code, "is bound to other objects"))
            for name, child in space.children.items():
                if name not in names or not isinstance(child, Items):
                    continue
                if child.not_plain and child.changing:
                    found.append(_say(space, name, code, "changes"))
            for name in names & space.opaque.keys():
                if space.opaque[name] == "file":
                    what = "is an open file, whose position changes"
                    found.append(_say(space, name, code, what))
                if space.opaque[name] == "unseen" and id(space.last.get(name)) not in unseen:
                    unseen.add(id(space.last.get(name)))
                    what = "is not looked into, and may change"
                    found.append(_say(space, name, code, what))
        return found


def _say(space: Names, name: str, code: CodeType, what: str) -> str:
    return (
        f"{space.label}.{name} {what} from step to step, and step {code.co_qualname} (line "
        f"{code.co_firstlineno}) reads it: a moved rank does not get it (hint: register it with "
        "ks.register(name, save, load), or keep plain data)"
    )


def _left_out(node: RegisteredNames, name: str) -> str:
    return (
        f"{node.label}.{name} changes, and the state_dict of {node.about()} leaves it out: a moved "
        "rank does not get it (hint: let state_dict have it if training depends on it)"
    )


# ----------------------------------------------------------------------------------------- code


def _reached(function: Any, depth: int = 0) -> list[CodeType]:
    """The function's code, and that of the script's functions that it calls by name."""
    code: CodeType = function.__code__
    found = [code, *(c for c in code.co_consts if isinstance(c, CodeType))]
    if depth < CALLS_DEPTH_MAX:
        for name in code.co_names:
            called = function.__globals__.get(name)
            if not isinstance(called, FunctionType) or called is function:
                continue
            if frames.origin(called.__code__.co_filename) == "script":
                found += _reached(called, depth + 1)
    return list(dict.fromkeys(found))


def _names(code: CodeType) -> frozenset[str]:
    return frozenset({*code.co_names, *code.co_freevars})


def _lines(code: CodeType) -> dict[int, list[dis.Instruction]]:
    lines: dict[int, list[dis.Instruction]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions else None
        lines.setdefault(line or code.co_firstlineno, []).append(instruction)
    return lines


def _clock(code: CodeType) -> list[str]:
    """Lines that compare what comes from the clock, directly or through a local variable."""
    if not _CLOCKS & {*code.co_names}:
        return []
    found: list[str] = []
    tainted: set[str] = set()
    for _ in range(2):  # a variable may be set further down, in a loop
        for line, instructions in sorted(_lines(code).items()):
            named = [str(x.argval) for x in instructions if x.opname.startswith("LOAD_")]
            timed = bool(tainted & {*named} or _CLOCK_CALLS & {*named} or named.count("time") > 1)
            if not timed:
                continue
            tainted |= {x.argval for x in instructions if x.opname.startswith("STORE_FAST")}
            if any(x.opname == "COMPARE_OP" for x in instructions):
                found.append(
                    f"step {code.co_qualname} decides by the clock (line {line}): a process that "
                    "repeats it decides otherwise (hint: decide by ks.committed_step)"
                )
    return found


def _place(code: CodeType) -> list[str]:
    names = {*code.co_names}
    found = sorted(_PLACES & names)
    if "LOCAL_RANK" in code.co_consts and names & {"environ", "getenv"}:
        found.append("LOCAL_RANK")
    return [
        f"step {code.co_qualname} (line {code.co_firstlineno}) reads {name}, which is another one "
        "where a moved rank runs (hint: use the rank, or read it before the first step)"
        for name in found
    ]
