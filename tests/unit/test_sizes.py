"""Files and classes that one can take in at a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "keepstep"
LINES_MAX = 500
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 12
ATTRIBUTES_MAX = 20
METHODS_MAX = 25
REASON = "hence so many"  # in the docstring of a class that is a table

Function = ast.FunctionDef | ast.AsyncFunctionDef


def attributes(tree: ast.ClassDef) -> set[str]:
    found = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return found


def too_large(path: Path) -> Iterator[str]:
    text = path.read_text()
    place = path.relative_to(SOURCE)
    if text.count("\n") > LINES_MAX:
        yield f"{place} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{place}: {node.name} has {lines} lines"
            names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > PARAMETERS_MAX:
                yield f"{place}: {node.name} has {count} parameters"
        elif isinstance(node, ast.ClassDef) and REASON not in (
            " ".join((ast.get_docstring(node) or "").split())
        ):
            methods = sum(isinstance(one, Function) for one in node.body)
            if methods > METHODS_MAX:
                yield f"{place}: {node.name} has {methods} methods"
            if len(attributes(node)) > ATTRIBUTES_MAX:
                yield f"{place}: {node.name} has {len(attributes(node))} attributes"


def test_nothing_is_too_large() -> None:
    assert [line for path in sorted(SOURCE.rglob("*.py")) for line in too_large(path)] == []
