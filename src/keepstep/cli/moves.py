"""`migrate` and `drain`: ask for a move, then wait for its outcome; or only for its plan.

The wait is only a look: ended by Ctrl-C, or by --no-wait not even begun, the move goes on. An
orchestrator that is being restarted is waited for, because it takes its open incidents up again.
One that is embedded in a launcher ends with its job; what became of the move is in its ledger.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from keepstep.cli import past_jobs, show
from keepstep.cli.find import FoundOrchestrator
from keepstep.cli.output import closed_text
from keepstep.cli.surroundings import home
from keepstep.errors import PermanentError, TransientError
from keepstep.model.views import IncidentView, PlanView
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import Asked, Watch

WATCH_S = 5.0  # also how late the reason of a wait is shown: it is no durable change
RETRY_S = 0.5
EXIT_CODES = {"RESOLVED": 0, "ABORTED": 1, "FAILED": 3, "FELL_BACK": 4, "DIVERGED": 5}


def ask(
    found: FoundOrchestrator, verb: str, body: Any, said: str, *, wait: bool, as_json: bool
) -> None:
    """Exits with the code of the outcome, unless that is 0 or nobody waits."""
    job = found.view.job
    asked = found.client().post(f"/v1/jobs/{job}/{verb}", body, Asked)
    show.words(f"{job}: {said} ({asked.incident})")
    if not wait:
        if as_json:
            show.print_json({"job": job, "ok": True, "incident": asked.incident})
        else:
            show.words("follow it with keepstep incidents")
        return
    outcome = wait_for(found, asked.incident)
    if as_json:
        show.print_json(outcome)
    else:
        show.words(closed_text(outcome))
    if code := EXIT_CODES[outcome.outcome]:
        sys.exit(code)


def plan(found: FoundOrchestrator, verb: str, body: Any, *, as_json: bool) -> None:
    """Nothing is changed."""
    seen = found.client().post(f"/v1/jobs/{found.view.job}/{verb}/plan", body, PlanView)
    if as_json:
        show.print_json(seen)
    else:
        show.print_plan(seen)


def wait_for(found: FoundOrchestrator, incident: str) -> IncidentView:
    client, job, entry = found.client(), found.view.job, found.entry
    change, silent, reason = 0, False, ""
    while True:
        try:
            seen = client.get(f"/v1/jobs/{job}/watch", Watch, since=change, wait_s=WATCH_S)
        except TransientError as error:
            if entry and entry.embedded and registry.read(home(), entry.id) is None:
                return _from_ledger(job, incident)
            if not silent:
                show.words(f"{error.message}; waiting for it")
            silent = True
            time.sleep(RETRY_S)
            continue
        silent = False
        change = seen.change
        view = next((one for one in seen.incidents if one.id == incident), None)
        if view is None:
            raise PermanentError(f"{job} does not know incident {incident} any more")
        if view.outcome != "OPEN":
            return view
        if view.reason != reason:
            reason = view.reason
            show.words(f"{incident}: {reason}")


def _from_ledger(job: str, incident: str) -> IncidentView:
    for past in past_jobs.past_jobs(home()):
        for view in past.incidents:
            if view.id == incident and view.outcome != "OPEN":
                return view
    raise PermanentError(
        f"job {job} ended before {incident} did", hint=f"keepstep incidents --job {job}"
    )
