"""Bad input as a user meets it: one clear error with a hint, nothing lost, nothing left running.

Covered elsewhere, and not again here: command lines that are refused before anything starts
(script missing, no such job without jobs, state directory under a file: unit/test_cli.py), every
route without its token and every bad body (test_api.py), every change of a ledger and every
damaged file (unit/test_ledger.py), each wrong Hello and garbage before and after it
(test_orchestrator.py), hostile blob connections to an idle agent (test_agent_process.py). Here:
the mistakes of scripts, real commands, and all attacks together on a job that trains.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.cli.checkpoints import check_resume
from keepstep.cli.main import invoke
from keepstep.errors import UsageError
from keepstep.model import agent_messages, blob_messages
from keepstep.model import messages as m
from keepstep.model.records import Tainted
from keepstep.model.wire import FRAME_BYTES_MAX, HEADER, frame
from keepstep.orchestrator import registry
from tests.support.commands import SCRIPTS, Job, command

SCRIPT = str(SCRIPTS / "mistakes.py")


def check_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    check_words(done.stderr, *words)


def check_words(errors: str, *words: str) -> None:
    """One line that says what is wrong, one that says what to do; nothing else."""
    lines = errors.splitlines()
    assert len(lines) == 2, errors
    assert lines[0].startswith("error: ") and all(word in lines[0] for word in words), errors
    assert re.fullmatch(r"hint: .+", lines[1]), errors


# --------------------------------------------------------------------------- mistakes of scripts


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks make every mistake together; the last one is not caught."""
    job = Job(tmp_path_factory.mktemp("all"), "--nproc-per-node", "2", SCRIPT, "all")
    try:
        job.end(1)
        yield job
    finally:
        job.kill()


AFTER_UPDATE = "after the first optimizer update inside step"
HOLE = "not noticed: the collective is not started through a wrapped function of torch.distributed"


@pytest.mark.parametrize(
    ("case", "words", "hint"),
    [
        ("model without parameters", ["no parameters"], "attach the model that is trained"),
        ("model that is none", ["model '0'", "Tensor", "Module"], "list or dict"),
        ("optimizer that is none", ["optimizer '0'", "str", "Optimizer"], "list or dict"),
        ("LBFGS", ["optimizer '0'", "LBFGS"], "takes no closure"),
        ("attach twice", ["attach", "twice"], "attach once"),
        ("register without state_dict", ["'counter'", "state_dict"], "ks.register(name, save"),
        ("register of no functions", ["'counter'", "two functions"], "save()"),
        ("register after the first step", ["'late'", "after the first step"], "after attach"),
        ("not attached", ["Adam.step()", "not attached"], "keepstep.attach"),
        ("closure by position", ["closure", "closure_by_position"], "without a closure"),
        ("closure by name", ["closure", "closure_by_name"], "without a closure"),
        ("update in a section", ["SGD.step()", "section"], "@ks.step"),
        ("step in a step", ["honest", "step_in_a_step"], "cannot contain steps"),
        ("collective after update", ["all_reduce", AFTER_UPDATE], "@ks.section, or split"),
        ("objects after update", ["all_gather", AFTER_UPDATE], "@ks.section, or split"),
        ("forward after update", ["forward", AFTER_UPDATE], "@ks.section, or split"),
        pytest.param(
            "forward of the wrapper after update", [AFTER_UPDATE], "@ks.section, or split",
        ),
        pytest.param(
            "backward after update", [AFTER_UPDATE], "@ks.section, or split",
        ),
        pytest.param(
            "point to point after update", [AFTER_UPDATE], "@ks.section, or split",
        ),
    ],
)  # fmt: skip
def test_mistake_is_refused_by_name(mistaken: Job, case: str, words: list[str], hint: str) -> None:
    found = re.findall(r"^\[rank (\d)\] MISTAKE (.*)$", mistaken.out, re.MULTILINE)
    said = [(rank, json.loads(text)) for rank, text in found]
    mine = {rank: one for rank, one in said if one["case"] == case}
    assert sorted(mine) == ["0", "1"]
    for one in mine.values():
        assert one["refused"], one
        assert all(word in one["message"] for word in words) and hint in one["hint"], one


def check_failed(job: Job, error: str, hint: str, code: int = 1) -> dict[str, Any]:
    """The launcher shows the error once, whole; status knows it after the end."""
    assert job.err.count("Traceback (most recent call last)") == 1, job.err
    assert f"keepstep.errors.UsageError: {error}" in job.err, job.err
    assert re.search(rf"^hint: .*{re.escape(hint)}", job.err, re.MULTILINE), job.err
    frames = re.findall(r'^  File "(.+?)"', job.err, re.MULTILINE)
    assert frames[0] == frames[-1] == SCRIPT, "from the script to what it did wrong"
    (view,) = job.cli_json("status")
    assert (view["state"], view["exit_code"]) == ("failed", code)
    assert error in view["traceback"] and hint in view["traceback"]
    assert registry.live(job.home) == []
    found: dict[str, Any] = view
    return found


def test_mistake_that_is_not_caught_ends_the_job_with_it(mistaken: Job) -> None:
    view = check_failed(mistaken, f"collective all_reduce {AFTER_UPDATE} 'honest:", "@ks.section")
    # Refused mistakes cost nothing: the honest steps after them were committed by both ranks.
    assert {rank["committed_step"] for rank in view["ranks"]} == {view["committed_step"]}
    assert view["committed_step"] >= 3


def test_reason_names_the_error_and_not_its_hint(mistaken: Job) -> None:
    (view,) = mistaken.cli_json("status")
    assert "UsageError: collective all_reduce" in view["reason"]
    assert "raised hint:" not in view["reason"]


@pytest.mark.parametrize(
    ("case", "code", "error", "hint"),
    [
        ("attach", 2, "attach: the model has no parameters", "attach the model that is trained"),
        ("collective", 1, f"collective all_reduce {AFTER_UPDATE} 'honest:", "@ks.section"),
    ],
)
def test_mistake_of_one_rank_ends_the_job_and_does_not_hang_it(
    tmp_path: Path, case: str, code: int, error: str, hint: str
) -> None:
    """The other rank stands in attach, or in the fence of the next step."""
    job = Job(tmp_path, "--nproc-per-node", "2", SCRIPT, case)
    try:
        job.end(code)
        check_failed(job, error, hint, code)
    finally:
        job.kill()


@pytest.mark.parametrize(
    ("case", "code", "error", "hint"),
    [
        (
            "gone",
            2,
            "the script of rank 1 ended without keepstep.attach while rank 0 waited",
            "every rank must call keepstep.attach",
        ),
        (
            "fewer",
            1,
            "the script of rank 1 has ended, and rank 0 began another step",
            "every rank must make the same number of steps",
        ),
    ],
)
def test_script_that_ends_early_does_not_keep_the_others_waiting(
    tmp_path: Path, case: str, code: int, error: str, hint: str
) -> None:
    job = Job(tmp_path, "--nproc-per-node", "2", "--stall-timeout", "3", SCRIPT, case)
    try:
        job.end(code)
        assert error in job.err and f"hint: {hint}" in job.err
    finally:
        job.kill()


def test_successor_of_a_rank_that_makes_more_steps_does_not_make_them_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nproc-per-node", "2", "--spares", "1", SCRIPT, "fewer")

    def survivor() -> int:
        """The pid of rank 0, once rank 1 has ended."""
        (view,) = job.cli_json("status") or [{"ranks": []}]
        seen = {rank["rank"]: rank for rank in view["ranks"]}
        return int(seen[0]["pid"]) if 1 in seen and seen[1]["state"] == "done" else 0

    try:
        job.until(lambda: registry.live(job.home), "the job to be known")
        psutil.Process(job.until(survivor, "the end of rank 1")).kill()
        job.end(1)
        hint = "every rank must make the same number of steps"
        view = check_failed(job, "rank 0 begins 'honest:", hint)
        assert view["committed_step"] == 3
    finally:
        job.kill()


REFUSED_ATTACH = """
import torch, keepstep
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
try:
    keepstep.attach(model, optimizer, scheduler=object())
except keepstep.UsageError as error:
    print("refused:", error)
keepstep.attach(model, optimizer)
print("attached")
"""


def test_refused_attach_changes_nothing(tmp_path: Path) -> None:
    done = command(["-c", REFUSED_ATTACH], tmp_path)
    assert "refused: cannot register 'scheduler'" in done.stdout and "hint: " in done.stdout
    assert done.returncode == 0 and "attached" in done.stdout, done.stderr


# --------------------------------------------------------------------------- attacks on a live job


def talk(host: str, port: int, data: bytes) -> bytes:
    """Send, and read until the other side closes; it must, and soon."""
    with socket.create_connection((host, port), timeout=15) as connection:
        # It may close while we are still sending: that is as good.
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionError:
            pass
        return received


HOSTILE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEADER.pack(0xFFFF_FFFF),
    HEADER.pack(FRAME_BYTES_MAX + 1) + b"x" * 1000,
    HEADER.pack(4) + b"\xde\xad\xbe\xef",
    HEADER.pack(2) + b"\xc1\xc1",
    frame({"type": "NoSuchMessage"}),
    frame({"type": "Hello", "token": 7}),
]


def test_attacks_on_a_live_job_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    options = ["--local-nodes", "2", "--job-id", "live"]
    job = Job(tmp_path, *options, SCRIPT, "honest", "--gate", str(gate))
    monkeypatch.setenv("KEEPSTEP_HOME", str(job.home))
    monkeypatch.delenv("KEEPSTEP_TOKEN", raising=False)
    try:
        job.until(lambda: job.out.count("waiting") == 2, "both ranks wait")
        (entry,) = registry.live(job.home)
        auth = {"authorization": f"Bearer {entry.token}"}
        with httpx.Client(base_url=entry.url, headers=auth, trust_env=False) as rest:

            def committed() -> bool:
                ranks = rest.get("/v1/jobs/live").json()["ranks"]
                return {rank["committed_step"] for rank in ranks} == {4}

            job.until(committed, "the progress of both ranks is known")
            before = rest.get("/v1/jobs/live").json()

            wrong_commands(job, entry.url, capsys, monkeypatch, tmp_path)
            wrong_tokens(entry)
            hostile_frames(entry, [node["pid"] for node in before["nodes"]])

            after = rest.get("/v1/jobs/live").json()
            assert {**after, "steps_per_s": 0} == {**before, "steps_per_s": 0}
            assert rest.get("/v1/jobs/live/incidents").json() == []
        gate.touch()
        job.end(0)
        ends = re.findall(r"END rank (\d) step 7 sha256 (\w{64})", job.out)
        assert sorted(rank for rank, _ in ends) == ["0", "1"]
        assert len({digest for _, digest in ends}) == 1
        assert "ok" in job.cli("ledger", "verify")
    finally:
        gate.touch()
        job.kill()


def wrong_commands(
    job: Job,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for words, said in [
        ("migrate --rank 9", "9"),
        ("migrate --rank -1", "-1"),
        ("migrate --rank 0 --job nobody", "nobody"),
        ("drain n9", "n9"),
        ("drain n0 --job nobody", "nobody"),
        ("taint n9 --reason x", "n9"),
        ("taint n0/7 --reason x", "no slot '7'"),
        ("untaint n9", "n9"),
        ("inject kill --rank 9", "9"),
        ("inject kill-node --node n9", "n9"),
        ("inject kill --rank 0 --job nobody", "nobody"),
        ("status --job nobody", "nobody"),
        ("incidents --job nobody", "nobody"),
        ("spares --job nobody", "nobody"),
        ("agent --node n0", "n0"),
        ("agent --job nobody", "nobody"),
    ]:
        code = invoke(words.split())
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), f"{words}: {code}\n{out}{err}"
        check_words(err, said)
    for words in (
        f"run --job-id live --orchestrator live {SCRIPT} all",
        f"run --job-id live {SCRIPT} all",
        "orchestrator --id live",
    ):
        check_error(command(["-m", "keepstep", *words.split()], job.home), 2, "live")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("KEEPSTEP_HOME", str(tmp_path / "elsewhere"))
        elsewhere.setenv("KEEPSTEP_TOKEN", "wrong")
        for words in (f"run --orchestrator {url} {SCRIPT} all", f"agent --orchestrator {url}"):
            assert invoke(words.split()) == 2, words
            check_words(capsys.readouterr().err, "token")


def wrong_tokens(entry: registry.Entry) -> None:
    wrong = {"authorization": "Bearer wrong"}
    with httpx.Client(base_url=entry.url, headers=wrong, trust_env=False) as stranger:
        for answer in (
            stranger.get("/v1/jobs"),
            stranger.post("/v1/jobs/live/migrate", json={"ranks": [0]}),
            stranger.post("/v1/jobs/live/cancel", json={}),
        ):
            assert answer.status_code == 401
            assert "token" in answer.json()["error"] and answer.json()["hint"]
    hello = agent_messages.Hello(
        protocol=m.PROTOCOL,
        token="wrong",
        job="live",
        node="n0",
        pid=1,
        session=1,
        blobs=m.Address("127.0.0.1", 1),
        slots=1,
    )
    heard = talk(entry.stream.host, entry.stream.port, frame(hello))
    said = msgspec.msgpack.decode(heard[HEADER.size :], type=agent_messages.Refused)
    assert said.error == "wrong token" and said.hint


def hostile_frames(entry: registry.Entry, agents: list[int]) -> None:
    """Garbage to the orchestrator's stream and to whatever the agents themselves listen on."""
    ports = {
        connection.laddr.port
        for agent in agents
        for connection in psutil.Process(agent).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(ports) == len(agents), "one blob server each"
    for data in HOSTILE:
        assert talk(entry.stream.host, entry.stream.port, data) == b""
        for port in ports:
            assert talk("127.0.0.1", port, data) == b""
    for port in ports:
        answer = talk(
            "127.0.0.1", port, frame(blob_messages.BlobGet(token="wrong", rank=0, tick=-2))
        )
        said = msgspec.msgpack.decode(answer[HEADER.size :], type=blob_messages.BlobReply)
        assert said == blob_messages.BlobRefused(error="wrong token")


# --------------------------------------------------------------------------- starting in bad places


def test_orchestrator_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--port", "--stream-port"):
            words = ["-m", "keepstep", "orchestrator", "--id", "x", option, port]
            check_error(command(words, tmp_path), 2, f"port {port}", "in use")
    assert list((tmp_path / "orchestrators").iterdir()) == []


@pytest.mark.parametrize("kind", ["under a file", "in /proc", "parts"])
@pytest.mark.parametrize("words", [["run", SCRIPT, "all"], ["orchestrator", "--id", "x"]])
def test_state_directory_not_writable(
    tmp_path: Path,
    kind: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As root nothing is forbidden, so these are places where nothing can be created."""
    (tmp_path / "file").touch()
    home = {
        "under a file": tmp_path / "file" / "home",
        "in /proc": Path("/proc/keepstep"),
        "parts": tmp_path / "home",
    }[kind]
    if kind == "parts":
        home.mkdir()
        (home / "ledgers").touch()
    monkeypatch.setenv("KEEPSTEP_HOME", str(home))
    assert invoke(words) == 2
    check_words(capsys.readouterr().err, str(home), "not writable")


def test_resume_from_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="checkpoint"):
        check_resume(str(tmp_path), 1)


# --------------------------------------------------------------------------- corrupted ledgers


def written(home: Path, name: str) -> Path:
    registry.prepare_home(home)
    path = registry.ledger_path(home, name)
    ledger = SqliteLedger(path)
    ledger.append([Tainted(job="j", at_ns=i, target=f"n{i}", reason="hot") for i in range(1, 5)])
    ledger.close()
    return path


def tampered(home: Path) -> Path:
    path = written(home, "tampered")
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE records SET body = replace(body, 'hot', 'hit') WHERE seq = 3")
    return path


def garbage(home: Path) -> Path:
    path = registry.ledger_path(home, "garbage")
    path.write_bytes(b"garbage" * 1000)
    return path


def test_verify_names_the_tampered_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    written(tmp_path, "good")
    path = tampered(tmp_path)
    assert invoke(["ledger", "verify"]) == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines[str(registry.ledger_path(tmp_path, "good"))] == "ok, 4 records"
    assert lines[str(path)].startswith("BROKEN: ") and "record 3" in lines[str(path)]


def test_verify_of_garbage_beside_a_good_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/reference/cli.md: exit code 1 if a ledger is broken."""
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    good = written(tmp_path, "good")
    path = garbage(tmp_path)
    code = invoke(["ledger", "verify"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines[str(good)] == "ok, 4 records"
    assert lines[str(path)].startswith("BROKEN: ")
    assert code == 1


def test_verify_of_garbage_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    written(tmp_path, "good")
    path = garbage(tmp_path)
    assert invoke(["ledger", "verify", str(path)]) in (1, 3)
    said = capsys.readouterr()
    assert str(path) in said.out + said.err and "not a" in said.out + said.err


def test_status_beside_a_garbage_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    written(tmp_path, "good")
    path = garbage(tmp_path)
    assert invoke(["status"]) == 3
    check_words(capsys.readouterr().err, str(path))


@pytest.mark.parametrize("kind", ["garbage", "tampered"])
def test_orchestrator_does_not_start_on_a_corrupted_ledger(tmp_path: Path, kind: str) -> None:
    registry.prepare_home(tmp_path)
    path = tampered(tmp_path) if kind == "tampered" else garbage(tmp_path)
    before = path.read_bytes()
    words = ["-m", "keepstep", "orchestrator", "--id", kind]
    done = command(words, tmp_path)  # one that starts runs on, which is an error in the end
    check_error(done, 3, str(path))
    assert path.read_bytes() == before, "evidence is not touched"
    assert registry.live(tmp_path) == []
