"""No two modules know each other, not even by a detour or only for the sake of types.

An import inside a function or under `if TYPE_CHECKING:` counts. It means the module that it names
and none of the packages around that: `from keepstep.a import b` means `keepstep.a.b` if there is
such a module, and else `keepstep.a`, whose `__init__.py` defines b or hands it on.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def modules(source: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports, of those known."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return (found & known.keys()) - {name}


def circles(source: Path) -> list[str]:
    """One for each, as `a -> b -> a`."""
    known = modules(source)
    graph = {name: sorted(imports(name, path, known)) for name, path in known.items()}
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found
        except CycleError as error:
            # It lists them in the order in which they are imported.
            ring = error.args[1][::-1]
            found.append(" -> ".join(ring))
            graph[ring[0]].remove(ring[1])


def test_no_modules_import_each_other() -> None:
    assert circles(SOURCE) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("from a.two import x", "import a.one"),
        ("from a import two", "from .one import y"),
        ("if TYPE_CHECKING:\n    from . import two", "def f():\n    from a.one import y"),
    ],
)
def test_a_circle_is_found(tmp_path: Path, one: str, other: str) -> None:
    write(tmp_path, "", one, other)
    assert circles(tmp_path) in (["a.one -> a.two -> a.one"], ["a.two -> a.one -> a.two"])


def test_a_package_that_hands_a_name_on_is_in_no_circle_with_what_it_hands_on(
    tmp_path: Path,
) -> None:
    write(tmp_path, "from a.one import y", "from a.two import x", "x = 1")
    assert circles(tmp_path) == []
    write(tmp_path, "from a.one import y", "from a import z", "x = 1")
    assert len(circles(tmp_path)) == 1


def write(folder: Path, package: str, one: str, other: str) -> None:
    (folder / "a").mkdir(exist_ok=True)
    for name, text in (("__init__", package), ("one", one), ("two", other)):
        (folder / "a" / f"{name}.py").write_text(text)
