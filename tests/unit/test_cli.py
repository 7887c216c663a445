"""The command line: layout of slots, what is refused before anything starts, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.cli.layout import (
    check_counts,
    compose_job_id,
    count_nodes,
    lay_out,
    parse_inject,
)
from keepstep.cli.main import COMMANDS, cli, invoke
from keepstep.cli.output import LogTail, Output
from keepstep.cli.surroundings import home_in
from keepstep.errors import UsageError
from keepstep.model.job import InjectSpec
from keepstep.model.records import IncidentClosed, JobEnded, Record
from keepstep.model.views import RankView, SpareView
from keepstep.orchestrator import registry
from tests.support.views import incident, view

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "home"
    monkeypatch.setenv("KEEPSTEP_HOME", str(where))
    return where


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('never run by these tests')\n")
    return str(path)


def ended(where: Path, job: str, at_ns: int) -> None:
    registry.prepare_home(where)
    ledger = SqliteLedger(registry.ledger_path(where, job))
    records: list[Record] = [
        IncidentClosed(job=job, at_ns=at_ns - 1, view=incident(f"{job}-1", job, at_ns - 9)),
        JobEnded(job=job, at_ns=at_ns, view=view(job)),
    ]
    ledger.append(records)
    ledger.close()


# --------------------------------------------------------------------------- layout


@pytest.mark.parametrize(
    ("nodes", "nproc", "spares", "spare_nodes", "slots", "standbys"),
    [
        (1, 4, 1, 0, [5], 1),
        (2, 2, 1, 0, [2, 3], 1),
        (3, 2, 4, 0, [3, 3, 4], 4),
        (3, 2, 0, 1, [2, 2, 2, 2], 2),
        (2, 2, 1, 2, [2, 3, 2, 2], 5),
        (1, 1, 0, 0, [1], 0),
    ],
)
def test_slots_are_laid_out(
    nodes: int, nproc: int, spares: int, spare_nodes: int, slots: list[int], standbys: int
) -> None:
    layout = lay_out(local_nodes=nodes, nproc=nproc, spares=spares, spare_nodes=spare_nodes)
    assert [node.slots for node in layout.nodes] == slots
    assert [node.name for node in layout.nodes] == [f"n{i}" for i in range(len(slots))]
    assert (layout.world, layout.local_world, layout.spares) == (nodes * nproc, nproc, standbys)
    assert sum(slots) == layout.world + layout.spares


def test_several_machines_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        count_nodes(nnodes=2, local_nodes=None)
    assert "--local-nodes 2" in caught.value.hint
    assert count_nodes(nnodes=2, local_nodes=2) == 2


def test_understudies_without_a_spare_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        check_counts(nproc=2, spares=0, spare_nodes=0, understudies=2)
    assert "--spares 1" in caught.value.hint
    check_counts(nproc=2, spares=1, spare_nodes=0, understudies=2)


def test_inject_words_become_a_spec() -> None:
    spec = parse_inject("kill:rank=2,step=5,point=in_backward", "inject-1")
    assert spec == InjectSpec(id="inject-1", action="kill", rank=2, step=5, point="in_backward")
    assert parse_inject("stop:rank=0,seconds=1.5", "i").seconds == 1.5
    assert parse_inject("kill-node:node=n1,step=9", "i").node == "n1"


def test_job_id_says_what_runs() -> None:
    found = compose_job_id("dir/my train!.py", "20261115-021455", "a1b2")
    assert found == "my-train-20261115-021455-a1b2"
    registry.check_id(found)
    registry.check_id(compose_job_id("…", "20261115-021455", "a1b2"))


def test_state_directory_follows_the_environment() -> None:
    assert home_in({"KEEPSTEP_HOME": "/a/b"}) == Path("/a/b")
    assert home_in({"XDG_STATE_HOME": "/x"}) == Path("/x/keepstep")
    assert home_in({}).parts[-3:] == (".local", "state", "keepstep")


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run", "Missing argument"),
        ("run no-such-script.py", "does not exist"),
        ("run .", "is a directory"),
        ("run -m no_such_module_anywhere", "no module"),
        ("run --nnodes 2 SCRIPT", "other machines"),
        ("run --nproc-per-node 0 SCRIPT", "--nproc-per-node is 0"),
        ("run --nproc_per_node x SCRIPT", "not a valid integer"),
        ("run --spares -1 SCRIPT", "--spares is -1"),
        ("run --stall-timeout 0 SCRIPT", "--stall-timeout"),
        ("run --redundancy parity SCRIPT", "there is 1 node, 1 of them with ranks"),
        ("run --redundancy parity --local-nodes 2 SCRIPT", "there are 2 nodes"),
        ("run --inject boom:rank=0 SCRIPT", "boom"),
        ("run --inject kill SCRIPT", "needs a rank"),
        ("run --inject kill:rank SCRIPT", "key=value"),
        ("run --inject kill:rank=zero SCRIPT", "rank"),
        ("run --inject kill:rank=0,point=nowhere SCRIPT", "no such point"),
        ("run --inject kill:rank=3 SCRIPT", "no rank 3"),
        ("run --inject kill-node:node=n9 SCRIPT", "no node n9"),
        ("run --resume no-such-dir SCRIPT", "no such directory"),
        ("run --resume . SCRIPT", "no complete checkpoint"),
        ("run --checkpoint-interval 10 SCRIPT", "without periodic checkpoints"),
        ("run --mttf 10 SCRIPT", "without periodic checkpoints"),
        ("run --checkpoint-dir x --checkpoint-interval soon SCRIPT", "soon"),
        ("run --checkpoint-dir x --checkpoint-interval 0 SCRIPT", "--checkpoint-interval"),
        ("run --checkpoint-dir x --mttf 0 SCRIPT", "--mttf is 0"),
        ("run --checkpoint-dir /dev/null SCRIPT", "--checkpoint-dir /dev/null"),
        ("run --orchestrator nobody SCRIPT", "no live orchestrator"),
        ("run --orchestrator http://127.0.0.1:1 SCRIPT", "no token"),
        ("run --job-id a/b SCRIPT", "cannot be an id"),
        ("no-such-command", "No such command"),
        ("status --job nobody", "no such job"),
        ("migrate --rank 0", "no job is running"),
        ("migrate", "Missing option"),
        ("drain n0", "no job is running"),
        ("taint n0", "Missing option"),
        ("inject kill", "needs a rank"),
        ("inject kill --rank 0 --at-point in_fence", "--at-step"),
        ("inject kill --rank 0 --at-step 3 --at-point nowhere", "nowhere"),
        ("agent --slots 0", "--slots"),
        ("agent --slots 1", "no job is running"),
        ("orchestrator --id ../x", "cannot be an id"),
        ("ledger verify no-such-ledger.db", "no ledger"),
    ],
)
def test_bad_input_is_one_line_and_a_hint_and_exit_code_2(
    words: str, said: str, script: str, capsys: Captured
) -> None:
    arguments = [script if word == "SCRIPT" else word for word in words.split()]
    assert invoke(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ") and said in lines[0]
    assert all(line.startswith("hint: ") for line in lines[1:]) and len(lines) <= 2


def test_state_directory_that_cannot_be_written_is_refused(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "file" / "home"))
    assert invoke(["run", script]) == 2
    err = capsys.readouterr().err
    assert "not writable" in err and "hint: set KEEPSTEP_HOME" in err


def test_every_command_has_help(capsys: Captured) -> None:
    import click

    names = cli.list_commands(click.Context(cli))
    assert set(names) >= set(COMMANDS) - {"demo"}
    for name in names:
        assert invoke([name, "--help"]) == 0
        assert "Usage: keepstep" in capsys.readouterr().out


# --------------------------------------------------------------------------- after the end


def test_status_and_incidents_work_after_the_end(state: Path, capsys: Captured) -> None:
    ended(state, "old", 100)
    ended(state, "new", 200)
    assert invoke(["status", "--json"]) == 0
    assert [one["job"] for one in json.loads(capsys.readouterr().out)] == ["new"]
    assert invoke(["status", "--all", "--json"]) == 0
    assert [one["job"] for one in json.loads(capsys.readouterr().out)] == ["new", "old"]
    assert invoke(["status", "--job", "old", "--json"]) == 0
    assert [one["job"] for one in json.loads(capsys.readouterr().out)] == ["old"]
    assert invoke(["incidents", "--all", "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == ["new-1", "old-1"]
    assert invoke(["incidents"]) == 0
    assert "rank 2: n0/2 -> n0/4" in capsys.readouterr().out
    assert invoke(["status"]) == 0
    assert "step 7" in capsys.readouterr().out
    assert invoke(["jobs", "--all", "--json"]) == 0
    assert [one["job"] for one in json.loads(capsys.readouterr().out)] == ["new", "old"]
    assert invoke(["jobs"]) == 0
    assert "new  done   0         7" in capsys.readouterr().out


def test_without_any_job_there_is_no_data_and_no_error(capsys: Captured) -> None:
    assert invoke(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert invoke(["status"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "no jobs" in err
    for command, word in (("jobs", "no jobs"), ("nodes", "no nodes"), ("spares", "no spares")):
        assert invoke([command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []
        assert invoke([command]) == 0
        out, err = capsys.readouterr()
        assert out == "" and word in err


def test_ledger_verify_says_what_is_broken(state: Path, capsys: Captured) -> None:
    import sqlite3

    ended(state, "good", 100)
    assert invoke(["ledger", "verify"]) == 0
    assert "ok, 2 records" in capsys.readouterr().out
    path = registry.ledger_path(state, "good")
    db = sqlite3.connect(path)
    with db:
        db.execute("UPDATE records SET body = replace(body, 'n0/4', 'n0/5') WHERE seq = 1")
    db.close()
    assert invoke(["ledger", "verify", str(path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)[0]
    assert result["ok"] is False and result["broken_seq"] == 1


def test_registry_ignores_dead_processes_and_files_others_can_read(state: Path) -> None:
    import os

    from keepstep.model.messages import Address

    registry.prepare_home(state)
    mine = registry.Entry(
        id="a",
        url="http://127.0.0.1:1",
        stream=Address("127.0.0.1", 2),
        token="t",
        pid=os.getpid(),
        pid_started=registry.process_started(os.getpid()) or 0,
    )
    registry.write(state, mine)
    assert registry.live(state) == [mine]
    reused = msgspec.structs.replace(mine, id="b", pid_started=1)
    registry.write(state, reused)
    assert registry.live(state) == [mine]
    elsewhere = msgspec.structs.replace(reused, id="c", host="another-machine")
    registry.write(state, elsewhere)
    assert registry.live(state) == [elsewhere, mine]  # a pid says nothing there
    registry.remove(state, "c")
    registry.entry_path(state, "a").chmod(0o644)
    assert registry.live(state) == []


# --------------------------------------------------------------------------- output


def rank_view(rank: int, worker: str) -> RankView:
    return RankView(
        rank=rank,
        pid=1,
        node="n0",
        slot="n0/0",
        worker=worker,
        generation=1,
        committed_step=0,
        state="running",
    )


def test_lines_are_put_under_the_name_that_a_worker_has_now(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_text("of an earlier job\n")
    tail = LogTail(tmp_path)
    spare = SpareView(worker="w2", pid=2, node="n1", slot="n1/0", state="parked")
    tail.learn(view("j", ranks=[rank_view(0, "w1")], spares=[spare]))
    (tmp_path / "w1.log").write_bytes(b"one\ntwo \xff\npart")
    (tmp_path / "w2.log").write_text("parked\n")
    (tmp_path / "agent-n0.log").write_text("not a rank\n")
    assert tail.poll(0.0) == ["[rank 0] one", "[rank 0] two \ufffd", "[spare n1/0] parked"]
    tail.learn(view("j", ranks=[rank_view(0, "w2")], spares=[spare]))
    with (tmp_path / "w2.log").open("a") as file:
        file.write("now a rank\n")
    assert tail.poll(0.1) == ["[rank 0] now a rank"]
    assert tail.poll(0.2, last=True) == ["[rank 0] part"]


def test_lines_of_a_worker_wait_for_its_name_but_not_for_ever(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    (tmp_path / "w7.log").write_text("early\n")
    assert tail.poll(0.0) == []
    assert tail.poll(10.0) == ["[w7] early"]


def test_a_closed_stdout_does_not_end_the_launcher() -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    output = Output(out=Closed())  # type: ignore[arg-type]
    output.lines(["one"])
    output.lines(["two"])
