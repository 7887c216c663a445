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


# Files of one name in several packages are about one thing, seen from several sides.
ONE_THING = {
    "agent.py": "the agent, real and simulated",
    "blobs.py": "side states that another node keeps: kept, handed out, sent",
    "channel.py": "the socket between an agent and a worker, both ends",
    "checkpoints.py": "periodic checkpoints: options, and when they are written",
    "commands.py": "commands, and the rules of the simulator about them",
    "groups.py": "process groups, real and simulated",
    "incidents.py": "incidents, and the rules of the simulator about them",
    "join.py": "how a node becomes one, both ends",
    "kubernetes.py": "Kubernetes: its nodes, and the command",
    "main.py": "the root of a program",
    "network.py": "what the network plugin says: read, judged, shown",
    "pace.py": "how fast ranks are: measured, known, simulated",
    "page.py": "the progress page: layout, writer, reader",
    "parity.py": "parities: the holder's and the rank's part",
    "process.py": "a worker's process, real and simulated",
    "processes.py": "processes, and what happens to them",
    "rank.py": "a rank, real and simulated",
    "schedule.py": "what a scheduler is asked and says: port and messages",
    "shards.py": "state that no other rank has, real and simulated",
    "slurm.py": "Slurm: its nodes, and the command",
    "stragglers.py": "stragglers, and the rules of the simulator about them",
    "trace.py": "the trace of `keepstep rehearse`: format and writer",
    "vault.py": "the vault: messages, server, store, a rank's line to it",
    "witness.py": "what must be equal, real and simulated",
    "workers.py": "the workers of a node, and what they say",
}


def test_files_of_one_name_are_about_one_thing() -> None:
    found: dict[str, int] = defaultdict(int)
    for path in SOURCE.rglob("*.py"):
        found[path.name] += not path.name.startswith("__")
    assert {name for name, count in found.items() if count > 1} == set(ONE_THING)


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
