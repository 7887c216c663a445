"""The core as a syntax tree: who calls, makes and sets what. Used by generate.py."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from keepstep import core


class Function(NamedTuple):
    module: str
    tree: ast.FunctionDef

    @property
    def name(self) -> str:
        return f"{self.module}.{self.tree.name}"


def core_modules() -> list[ModuleType]:
    folder = Path(str(core.__file__)).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return [importlib.import_module(f"keepstep.core.{name}") for name in names]


@functools.cache
def functions_of(module: ModuleType) -> list[Function]:
    short = module.__name__.rsplit(".", 1)[1]
    trees = ast.walk(ast.parse(inspect.getsource(module)))
    return [Function(short, tree) for tree in trees if isinstance(tree, ast.FunctionDef)]


def core_functions() -> list[Function]:
    return [function for module in core_modules() for function in functions_of(module)]


def called(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls in the order in which they are written."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def made_in(tree: ast.AST, kinds: Sequence[type]) -> list[str]:
    names = {kind.__name__ for kind in kinds}
    return list(dict.fromkeys(name_of(call) for call in called(tree) if name_of(call) in names))


def makers(functions: Sequence[Function], kind: type) -> list[str]:
    return [f"`{one.name}`" for one in functions if made_in(one.tree, [kind])]


def words(thing: Any) -> str:
    """The docstring as one line; msgspec and dataclasses make up none that counts."""
    return " ".join((thing.__doc__ or "").split())


def constants(tree: ast.AST) -> list[str]:
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in found if isinstance(value, str)]


def sentences(tree: ast.AST) -> list[str]:
    """Texts of several words; what is filled in is shown as dots."""
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(below) for one in parts for below in ast.walk(one)}
    texts = []
    for one in parts:
        values = [v.value if isinstance(v, ast.Constant) else "..." for v in one.values]
        texts.append("".join(str(value) for value in values))
    texts += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in inside and isinstance(node.value, str)
    ]
    return [text for text in texts if " " in text]


def settings(attribute: str, functions: Sequence[Function]) -> Iterator[tuple[str, str]]:
    """(value, function) wherever an attribute or a parameter of that name is given a constant."""
    place = {}
    for one in functions:
        names = [argument.arg for argument in one.tree.args.args]
        if attribute in names:
            place[one.tree.name] = names.index(attribute)
    for one in functions:
        for node in ast.walk(one.tree):
            given: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                given = list(_assigned(attribute, node))
            elif isinstance(node, ast.Call):
                given = [word.value for word in node.keywords if word.arg == attribute]
                index = place.get(name_of(node))
                given += node.args[index : index + 1] if index is not None else []
            yield from ((value, one.name) for expr in given for value in constants(expr))


def _assigned(attribute: str, node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts))
        for left, right in pairs:
            if isinstance(left, ast.Attribute) and left.attr == attribute:
                yield right
