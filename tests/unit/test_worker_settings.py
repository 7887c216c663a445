"""What a worker is told in its Welcome, also where a user has said it by variables."""

from __future__ import annotations

import msgspec

from keepstep.agent.worker_environment import worker_environment, worker_settings
from keepstep.model.agent_messages import StartWorker
from keepstep.model.commands import Welcome, WorkerSettings
from keepstep.model.messages import Address

START = StartWorker(
    worker="w0",
    slot=0,
    rank=0,
    generation=1,
    world=2,
    local_world=1,
    master=Address("127.0.0.1", 1),
    buddy=None,
    script=["train.py"],
    redundancy="parity",
)


def settings(base: dict[str, str], **job: str) -> WorkerSettings:
    start = msgspec.structs.replace(START, env=job)
    return worker_settings(worker_environment(base, start, job="j", bind="127.0.0.1"), start)


def test_variables_of_a_user_come_in_the_welcome() -> None:
    assert settings({}) == WorkerSettings(redundancy="parity")
    said = settings({"KEEPSTEP_VAULT_LANES": "3", "KEEPSTEP_VAULT_SLICE": "x"})
    assert (said.vault_lanes, said.vault_slice) == ("3", "x"), "who uses it refuses it"
    said = settings({"KEEPSTEP_TRACE": "/t"}, KEEPSTEP_STEPS_MAX="9", KEEPSTEP_TRACE="/job")
    assert (said.trace, said.steps_max) == ("/job", 9), "the job's own words beat inherited ones"
    assert settings({"KEEPSTEP_STEPS_MAX": "many"}).steps_max == 0


def test_a_welcome_without_settings_is_one_with_none() -> None:
    said = {
        "job": "j",
        "node": "n",
        "worker": "w",
        "token": "t",
        "blobs": {"host": "::1", "port": 1},
    }
    more = {"stall_timeout_ns": 1, "interface": "::1"}
    assert msgspec.convert({"type": "Welcome", **said, **more}, Welcome).settings == (
        WorkerSettings()
    )
