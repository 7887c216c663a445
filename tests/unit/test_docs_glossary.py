"""The glossary explains each word once, knows every phase and outcome, and names what exists."""

from __future__ import annotations

import re
import typing
from pathlib import Path

from keepstep.core import phases, rewire
from keepstep.model import agent_messages, blob_messages, commands, messages, records, views

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| .+ \|$", PAGE, re.MULTILINE)
WORDS = [word.strip() for row in ROWS for word in row.split(",")]


def test_no_word_is_explained_twice() -> None:
    explained = [word for word in WORDS if word not in ("word", "phase", "outcome")]
    assert len(explained) > 80
    assert sorted(set(explained)) == sorted(explained)


def test_every_phase_and_outcome_is_explained() -> None:
    before = [phase for phase, _ in phases.PHASES["unplanned"]]
    after = [phase for phase, _ in rewire.FORWARD]
    outcomes = set(typing.get_type_hints(views.IncidentView)["outcome"].__args__) - {"OPEN"}
    assert not {*before, "COMMIT", *after, "RETIRE", *outcomes} - set(WORDS)


WHERE = (agent_messages, blob_messages, commands, messages, records)


def test_messages_and_records_have_the_names_that_are_used() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)`", PAGE))
    named |= {word for word in WORDS if re.fullmatch(r"[A-Z][a-z]+", word)}
    assert named
    assert not [one for one in named if not any(hasattr(where, one) for where in WHERE)]


def test_readme_and_architecture_lead_to_it() -> None:
    for page in ("README.md", "ARCHITECTURE.md"):
        assert "docs/reference/glossary.md" in (ROOT / page).read_text()
