"""A name stands for one thing, and words that were given up stay away."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "keepstep"
# The word of before, and where it still has another meaning.
GIVEN_UP = {
    r"\bseats?\b": (),  # a rank's process
    # A spare of a job; an orchestrator that is not active is a standby.
    r"(?i)standby": (
        "orchestrator/api.py",
        "orchestrator/requests.py",
        "orchestrator/rest.py",
        "orchestrator/terms.py",
        "cli/client.py",
        "cli/find.py",
    ),
}


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.parametrize("word", GIVEN_UP)
def test_words_that_were_given_up(word: str) -> None:
    left = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in GIVEN_UP[word]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(word, line)
    ]
    assert left == []
