"""What a running frame holds under no name: the iterators of its `for` loops, and operands.

`total += step(x)` puts `total` on the frame's value stack before it calls `step`, and so does
`losses.append(step(x))` with the list, and a comprehension with the list that it builds.

CPython shows them to nobody, so they are read from memory: an interpreter frame has its locals in
an array, and the value stack right behind them. How deep a loop's iterator lies is a property of
the bytecode: the compiler knows the stack's depth at every instruction, and `dis.stack_effect`
lets us find it again. A slot is read only if the depth at the current instruction says that it is
in use; what lies above is stale.

Where the array begins is found by looking for a known object, and the whole is tried at import on
nested loops (`available`). Without it, only iterators that have a name are seen.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
import functools
import sys
from collections import deque
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

_WORD: Final = ctypes.sizeof(ctypes.c_void_p)
_F_FRAME: Final = object.__basicsize__ + _WORD  # PyFrameObject: head, f_back, f_frame
_KNOWN_VERSIONS: Final = ((3, 11), (3, 12), (3, 13))
_UNKNOWN_DEPTH: Final = -1
OPERAND: Final = "<operand "


class _Layout(NamedTuple):
    """Of a frame's value stack at one instruction."""

    loops: tuple[LoopSlot, ...]
    operands: tuple[int, ...]  # words


class LoopSlot(NamedTuple):
    position: int  # on the value stack
    line: int
    word: int  # in the array of locals and stack


def loop_iterators(frame: FrameType) -> list[tuple[Any, int]]:
    """Of the `for` loops around the current instruction, outermost first, each with its line."""
    if not available:
        return []
    return [(_at(frame, slot.word), slot.line) for slot in _layout(frame).loops]


def operands(frame: FrameType) -> dict[str, Any]:
    """What waits on the value stack until the current call returns, by made-up names."""
    if not available:
        return {}
    found = {}
    for word in _layout(frame).operands:
        if _word(_address(frame, word)):  # Python pushes null pointers, too
            found[f"{OPERAND}{word}>"] = _at(frame, word)
    return found


def set_operand(frame: FrameType, name: str, value: Any) -> None:
    word = int(name[len(OPERAND) : -1])
    if word in _layout(frame).operands:
        _put(frame, word, value)


def set_loop(frame: FrameType, number: int, iterator: Any) -> None:
    """Let the loop, counted from the outermost, go on with another iterator."""
    _put(frame, _layout(frame).loops[number].word, iterator)


def _put(frame: FrameType, word: int, value: Any) -> None:
    address = _address(frame, word)
    old = _word(address)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    ctypes.c_size_t.from_address(address).value = id(value)
    ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(old))


def collector(frame: FrameType) -> str:
    """The name of what the current instruction runs, if that is C code which collects what it is
    given where nobody sees it: `sum(step(x) for x in batches)`."""
    key = frame.f_code, frame.f_lasti
    if key not in _collectors:
        _collectors[key] = _find_collector(frame)
    return _collectors[key]


# ------------------------------------------------------------------------------------- bytecode

_layouts: dict[tuple[CodeType, int], _Layout] = {}
_collectors: dict[tuple[CodeType, int], str] = {}


def _layout(frame: FrameType) -> _Layout:
    code, lasti = frame.f_code, frame.f_lasti
    known = _layouts.get((code, lasti))
    if known is None:
        known = _layouts[code, lasti] = _find_layout(code, lasti)
    return known


def _find_layout(code: CodeType, lasti: int) -> _Layout:
    instructions = list(dis.get_instructions(code))
    depths = _depths(code, instructions)
    cells = sum(name not in code.co_varnames for name in code.co_cellvars)
    base = code.co_nlocals + cells + len(code.co_freevars)
    here = max((i for i, x in enumerate(instructions) if x.offset <= lasti), default=0)
    current = instructions[here]
    before = depths.get(current.offset, _UNKNOWN_DEPTH)
    after = before + _effect(current, jump=False)
    in_use = min(before, after - 1)  # a call's own arguments may be gone already
    found, line = [], code.co_firstlineno
    for instruction in instructions:
        if instruction.starts_line:
            line = instruction.positions.lineno or line if instruction.positions else line
        if instruction.opname != "FOR_ITER":
            continue
        if not instruction.offset <= lasti < instruction.argval:  # at it: it asks for the next item
            continue
        position = depths.get(instruction.offset, 0) - 1
        if 0 <= position < in_use:
            found.append(LoopSlot(position, line, base + position))
    taken = {slot.word for slot in found}
    words = range(base, base + max(in_use, 0))
    return _Layout(tuple(sorted(found)), tuple(word for word in words if word not in taken))


def _find_collector(frame: FrameType) -> str:
    code = frame.f_code
    instructions = list(dis.get_instructions(code))
    here = max((i for i, x in enumerate(instructions) if x.offset <= frame.f_lasti), default=0)
    current = instructions[here]
    if current.opname in _COLLECTING:
        return _COLLECTING[current.opname]
    if not current.opname.startswith("CALL"):
        return ""
    depths = _depths(code, instructions)
    below = depths.get(current.offset, 0) + _effect(current, jump=False) - 1
    for x in reversed(instructions[:here]):  # who has put the callable there
        depth = depths.get(x.offset, _UNKNOWN_DEPTH)
        if depth + _effect(x, jump=False) > below + 2 or depth > below + 1:
            continue
        if x.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            return f".{x.argval}" if x.argval in _COLLECTING_METHODS else ""
        if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            known = {**vars(builtins), **frame.f_globals}.get(x.argval)
            return x.argval if any(known is one for one in _COLLECTORS) else ""
        if x.opname not in ("PUSH_NULL", "COPY_FREE_VARS"):
            return ""
    return ""


def _depths(code: CodeType, instructions: list[dis.Instruction]) -> dict[int, int]:
    """The stack's depth before each instruction that normal flow or a handler reaches."""
    index = {x.offset: i for i, x in enumerate(instructions)}
    handlers = list(dis._parse_exception_table(code))  # type: ignore[attr-defined]
    depths: dict[int, int] = {}
    todo = [(0, 0)]
    todo += [(h.target, h.depth + 1 + bool(h.lasti)) for h in handlers]
    while todo:
        offset, depth = todo.pop()
        if offset in depths or offset not in index:
            continue
        depths[offset] = depth
        x = instructions[index[offset]]
        if x.opcode in dis.hasjrel or x.opcode in dis.hasjabs:
            todo.append((x.argval, depth + _effect(x, jump=True)))
        ends = x.opname in _ENDS or x.opname.startswith("JUMP_")
        if not ends and index[offset] + 1 < len(instructions):
            following = instructions[index[offset] + 1].offset
            todo.append((following, depth + _effect(x, jump=False)))
    return depths


def _effect(x: dis.Instruction, *, jump: bool) -> int:
    if x.opname == "RETURN_GENERATOR":
        return 1  # what it leaves is seen by the generator only, and 3.11 says 0
    return dis.stack_effect(x.opcode, x.arg, jump=jump)


_COLLECTORS: Final = (
    *(list, tuple, set, frozenset, dict, deque, sum, max, min, sorted, any, all, functools.reduce),
)
_COLLECTING_METHODS: Final = frozenset({"extend", "fromiter", "reduce"})
_COLLECTING: Final = {
    "LIST_EXTEND": "[*...]",
    "SET_UPDATE": "{*...}",
    "DICT_UPDATE": "{**...}",
    "UNPACK_SEQUENCE": "an unpacking assignment",
    "UNPACK_EX": "an unpacking assignment",
    "CONTAINS_OP": "in",
}
_ENDS: Final = {"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS"}


# --------------------------------------------------------------------------------------- memory


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _address(frame: FrameType, word: int) -> int:
    return _word(id(frame) + _F_FRAME) + _locals_at + word * _WORD


def _at(frame: FrameType, word: int) -> Any:
    return ctypes.py_object.from_address(_address(frame, word)).value


def _find_locals() -> int:
    """How far behind the head of an interpreter frame its locals begin."""
    marker, second = object(), object()
    frame = sys._getframe()
    start = _word(id(frame) + _F_FRAME)
    words = [_word(start + i * _WORD) for i in range(14)]
    if id(frame.f_code) not in words or id(frame.f_globals) not in words:
        return 0  # another layout
    for i in range(len(words) - 1):
        if words[i] == id(marker) and words[i + 1] == id(second):
            return i * _WORD
    return 0


def _self_test() -> bool:
    def nested(outer: Any, inner: Any, cell: Any) -> list[Any]:
        for _ in outer:
            with memoryview(b""):
                for _ in inner:
                    return [cell, *(it for it, _ in loop_iterators(sys._getframe()))]
        return [lambda: cell]

    def suspended(items: Any) -> Any:
        for item in items:  # noqa: UP028  # the loop is what is looked for
            yield item

    def adding(value: int) -> int:
        return value + changed(sys._getframe())

    def changed(frame: FrameType) -> int:
        (name,) = operands(frame)
        set_operand(frame, name, 30)
        return 4

    if adding(3) != 34:
        return False
    a, b = iter([1, 2]), iter((3, 4))
    third = iter([5, 6])
    generator = suspended(third)
    next(generator)
    seen = nested(a, b, None)
    within = loop_iterators(generator.gi_frame)
    return len(seen) == 3 and seen[1] is a and seen[2] is b and [it for it, _ in within] == [third]


def _probe() -> bool:
    global available, _locals_at
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _KNOWN_VERSIONS:
        return False
    _locals_at = _find_locals()
    available = _locals_at > 0
    try:
        return available and _self_test()
    except Exception:
        return False


_locals_at = 0
available = False
available = _probe()
