"""Who reads the environment: programs at their edge, native parts, and those listed here with why.

Settings reach a worker in its Welcome, and everything else is handed down from the edge. A module
that is run (`python -m`) may read under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "keepstep"

NAMES = ("os.environ", "os.environb", "os.getenv")
MAY: dict[str, str] = {
    "cli/main.py": "the edge of the command line: the console script calls it",
    "demo_train.py": "a script as a user's, which asks what torchrun says",
    "adapters/schedule/slurm_cli.py": "the environment of Slurm's own commands",
    "adapters/schedule/local.py": "the environment of the agents that it starts",
    "adapters/schedule/kubernetes_api.py": "whether this is a pod: the client's own variables",
    "worker/api/attach.py": "a script that no agent started: only torchrun says whose rank it is",
    "worker/device/alike.py": "what libraries will read, as the script has left it",
    "worker/groups/frontend.py": "init_process_group reads them at that moment, and so must we",
    "worker/groups/gloo.py": "torch reads it for each new group, and so must we",
}


def reads(tree: ast.Module) -> list[int]:
    """Lines with `os.environ` or `getenv`, but for writes and what only runs in a program."""
    found = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            continue
        if _is_class_of(node):
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) in NAMES:
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for one in node.names if "env" in one.name]
        stack += ast.iter_child_nodes(node)
    return sorted(found)


def _is_class_of(node: ast.AST) -> bool:
    """`os.environ.__class__`: parking.py changes what a question by key does, and asks none."""
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def readers() -> dict[str, list[int]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if path.name == "__main__.py" or name.startswith("native/"):
            continue
        if lines := reads(ast.parse(path.read_text())):
            found[name] = lines
    return found


def test_the_environment_is_read_at_the_edge_only() -> None:
    found = readers()
    assert not {name: lines for name, lines in found.items() if name not in MAY}
    assert not MAY.keys() - found.keys(), "these read it no more"


@pytest.mark.parametrize(
    "text, lines",
    [
        ("import os\nos.environ['A'] = '1'\ndel os.environ['A']", []),
        ("import os\nx = os.environ['A']", [2]),
        ("import os\ndef f():\n    return os.environ.get('A')", [3]),
        ("import os\nx = {**os.environ}", [2]),
        ("import os\nx = os.getenv('A')", [2]),
        ("from os import environ", [1]),
        ("import os\nif __name__ == '__main__':\n    main(os.environ)", []),
    ],
)
def test_reads_are_told_from_writes(text: str, lines: list[int]) -> None:
    assert reads(ast.parse(text)) == lines
