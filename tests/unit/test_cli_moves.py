"""`migrate` and `drain` wait for the outcome and end with its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.cli import find, moves
from keepstep.cli.main import invoke
from keepstep.errors import TransientError
from keepstep.model.messages import Address
from keepstep.model.records import IncidentClosed, JobEnded
from keepstep.model.views import IncidentView, MoveView, OfferView, PlanView, RejectedView
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import Asked, Watch
from tests.support.views import incident, view

Captured = pytest.CaptureFixture[str]


def at(outcome: str, reason: str = "requested") -> IncidentView:
    opened = incident("job-1", "job", 5)
    return msgspec.structs.replace(opened, outcome=outcome, reason=reason)  # type: ignore[arg-type]


class Orchestrator:
    """Answers one watch after the other; an exception among them is raised."""

    def __init__(self, *answers: IncidentView | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any]] = []

    def post(self, path: str, body: Any, kind: Any) -> Any:
        self.asked.append((path, body))
        return Asked(incident="job-1")

    def get(self, path: str, kind: Any, **query: Any) -> Any:
        assert path == "/v1/jobs/job/watch"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Watch(change=1, job=view("job", "running"), incidents=[answer])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    monkeypatch.setattr(moves, "RETRY_S", 0.0)
    registry.prepare_home(tmp_path)
    return tmp_path


def run(
    monkeypatch: pytest.MonkeyPatch, there: Orchestrator, *words: str, embedded: bool = False
) -> int:
    entry = registry.Entry(
        id="job",
        url="http://127.0.0.1:1",
        stream=Address("127.0.0.1", 1),
        token="t",
        pid=1,
        pid_started=0,
        embedded=embedded,
    )
    found = find.FoundOrchestrator(entry=entry, view=view("job", "running"))
    monkeypatch.setattr(find, "one_job", lambda home, which: found)
    monkeypatch.setattr(find.Client, "of", lambda entry: there)
    return invoke(words)


@pytest.mark.parametrize(
    ("outcome", "code"), [("RESOLVED", 0), ("ABORTED", 1), ("FAILED", 3), ("FELL_BACK", 4)]
)
def test_the_outcome_is_the_exit_code(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    there = Orchestrator(at("OPEN"), at("OPEN", "waiting for a spare"), at(outcome))
    assert run(monkeypatch, there, "migrate", "--rank", "2", "--json") == code
    said = capsys.readouterr()
    assert json.loads(said.out)["outcome"] == outcome
    assert "waiting for a spare" in said.err


def test_no_wait_returns_at_once(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    there = Orchestrator()
    assert run(monkeypatch, there, "drain", "n1", "--no-wait", "--json") == 0
    assert json.loads(capsys.readouterr().out)["incident"] == "job-1"
    assert there.asked[0][0] == "/v1/jobs/job/drain"


def test_a_restarting_orchestrator_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    gone = TransientError("no orchestrator answers")
    there = Orchestrator(at("OPEN"), gone, gone, at("RESOLVED"))
    assert run(monkeypatch, there, "drain", "n1") == 0
    assert capsys.readouterr().err.count("no orchestrator answers") == 1


def test_an_orchestrator_that_ended_with_its_job_left_a_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, state: Path
) -> None:
    ledger = SqliteLedger(registry.ledger_path(state, "job"))
    ledger.append(
        [
            IncidentClosed(job="job", at_ns=8, view=at("ABORTED", "all ranks finished")),
            JobEnded(job="job", at_ns=9, view=view("job")),
        ]
    )
    ledger.close()
    there = Orchestrator(TransientError("gone"))
    assert run(monkeypatch, there, "migrate", "--rank", "2", embedded=True) == 1
    assert "all ranks finished" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["migrate", "--rank", "2"], ["drain", "n1"]])
def test_a_plan_is_printed_and_nothing_is_asked_for(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    plan = PlanView(
        job="job",
        asked="drain n1",
        moves=[MoveView(rank=2, origin="n1/0", to="n2/0", cost="spare", reason="[parked]")],
        rejected=[RejectedView(what="n1/1 (n1.w7)", why="its node is the one to be drained")],
        offers=[OfferView(place="c9", kind="idle", reason="nobody uses it")],
        then=["n1 is tainted"],
    )
    there = Orchestrator()
    monkeypatch.setattr(there, "post", lambda path, body, kind: there.asked.append(path) or plan)
    assert run(monkeypatch, there, *words, "--plan-only", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=PlanView) == plan
    assert run(monkeypatch, there, *words, "--plan-only") == 0
    said = capsys.readouterr().out
    for part in ("nothing is changed", "[parked]", "n1/1 (n1.w7)", "c9", "then n1 is tainted"):
        assert part in said
    assert there.asked == [f"/v1/jobs/job/{words[0]}/plan"] * 2
