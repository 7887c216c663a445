"""Every way to start a job takes every option, and makes the same JobSpec of the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep import native
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.cli import jobspec, kubernetes, scheduled, slurm
from keepstep.cli import run as running
from keepstep.cli.main import invoke
from keepstep.cli.options import JOB, GroupedOption, JobOptions
from keepstep.core.operator import check_spec
from keepstep.errors import UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import Ask, Capabilities, Lease, Policy
from keepstep.native import plugin

Captured = pytest.CaptureFixture[str]
Launch = Callable[..., int]

# One word for every option of a job, none of which is its default.
WORDS: dict[str, list[str]] = {
    "nproc": ["--nproc-per-node", "2"],
    "spares": ["--spares", "1"],
    "spare_nodes": ["--spare-nodes", "2"],
    "understudies": ["--understudies", "1"],
    "redundancy": ["--redundancy", "parity"],
    "within": ["--within", "rack", "--within", "switch"],
    "stall_s": ["--stall-timeout", "7"],
    "stragglers": ["--stragglers", "move"],
    "straggler_factor": ["--straggler-factor", "2.5"],
    "straggler_s": ["--straggler-after", "5"],
    "rebalance": ["--rebalance", "when-free"],
    "quiet_s": ["--quiet-after", "0"],
    "on_divergence": ["--on-divergence", "fall-back"],
    "inject": ["--inject", "kill:rank=2,step=5"],
    "checkpoint_dir": ["--checkpoint-dir", "checkpoints"],
    "interval": ["--checkpoint-interval", "30"],
    "mttf_h": ["--mttf", "12"],
    "net": ["--net=tcp"],
    "log_dir": ["--log-dir", "logs"],
    "job_id": ["--job-id", "one"],
    "quiet": ["--quiet"],
}
ELSEWHERE = {
    "mode": "test_what_a_scheduler_cannot_honour_is_refused_by_name",
    "module": "test_a_module_and_its_arguments_are_given_on",
    "resume": "test_bad_words_are_refused_alike",
    "orchestrator": "test_bad_words_are_refused_alike",
}


class FakeScheduler:
    """Gives what is asked for."""

    settings = Settings()
    server = "https://127.0.0.1:1"

    def __init__(self, name: str) -> None:
        self.name = name

    def capabilities(self) -> Capabilities:
        return Capabilities(taint=True, preempt=True, shrink=True)

    def check(self, *_: object) -> None:
        pass

    def acquire(self, ask: Ask, timeout_s: float) -> Lease:
        places = [f"place{i}" for i in range(ask.count)]
        return Lease(id="1", job=ask.job, op=ask.op, kind="queue", places=places)

    def leases(self, job: str = "") -> list[Lease]:
        return []


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """What would have been submitted."""
    found: list[JobSpec] = []

    async def submitted(spec: JobSpec, *_: Any, **__: Any) -> int:
        found.append(spec)
        return 0

    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('never run by these tests')\n")
    (tmp_path / "pod.yaml").write_text("spec: {containers: [{image: x}]}\n")
    monkeypatch.setattr(native, "store_host_path", lambda: Path("/store"))
    monkeypatch.setattr(plugin, "ensure", lambda: Path("/net"))
    monkeypatch.setattr(jobspec, "check_mode", lambda mode: None)
    monkeypatch.setattr(running, "launch", submitted)
    monkeypatch.setattr(scheduled, "_run", submitted)
    monkeypatch.setattr(scheduled.release_guard, "begin", lambda *_: None)
    monkeypatch.setattr(slurm, "SlurmScheduler", lambda: FakeScheduler("slurm"))
    monkeypatch.setattr(kubernetes, "connect", lambda **_: FakeScheduler("kubernetes"))
    return found


LAUNCHERS: dict[str, list[str]] = {
    "run": ["run", "--local-nodes", "3"],
    "slurm": ["slurm", "launch", "--nodes", "3"],
    "kubernetes": ["kubernetes", "launch", "--nodes", "3", "--pod-template", "pod.yaml"],
}


def common(spec: JobSpec) -> JobSpec:
    """Without what only a scheduler's job has."""
    return msgspec.structs.replace(spec, provision=None)


def test_every_option_of_a_job_is_tried() -> None:
    assert {*WORDS, *ELSEWHERE, "script", "args"} == set(JobOptions.__struct_fields__)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_knows_every_option_of_a_job(name: str) -> None:
    command = {"run": running.run, "slurm": slurm.launch, "kubernetes": kubernetes.launch}[name]
    names = {param.name for param in command.params}
    assert names >= set(JobOptions.__struct_fields__) and len(JOB) == len(
        JobOptions.__struct_fields__
    )
    assert all(param.group for param in command.params if isinstance(param, GroupedOption)), (
        "an option without a heading"
    )


@pytest.mark.parametrize("option", WORDS)
def test_the_same_word_says_the_same_to_every_launcher(option: str, specs: list[JobSpec]) -> None:
    needed = {
        "understudies": ["spares"],
        "redundancy": ["spare_nodes"],
        "on_divergence": ["checkpoint_dir"],
        "interval": ["checkpoint_dir"],
        "mttf_h": ["checkpoint_dir"],
    }
    words = [word for one in [option, *needed.get(option, [])] for word in WORDS[one]]
    plain = [] if option == "job_id" else WORDS["job_id"]
    for launcher in LAUNCHERS.values():
        assert invoke([*launcher, *words, *plain, "train.py", "--lr", "3"]) == 0
    first, *others = map(common, specs)
    assert others == [first, first]


def test_all_words_together_make_the_same_job(specs: list[JobSpec], tmp_path: Path) -> None:
    for launcher in LAUNCHERS.values():
        words = [word for one in WORDS.values() for word in one]
        assert invoke([*launcher, *words, "train.py", "--quiet"]) == 0
    one, *others = specs
    assert [common(spec) for spec in others] == [one, one]
    assert (one.world, one.local_world, one.spares, one.understudies) == (6, 2, 5, 1)
    assert [node.slots for node in one.nodes] == [2, 2, 3, 2, 2]
    assert (one.redundancy, one.env, one.script) == (
        "parity",
        {"KEEPSTEP_NET": "tcp"},
        ["train.py", "--quiet"],
    )
    assert (one.stall_timeout_ns, one.mttf_ns) == (7 * 10**9, 12 * 3600 * 10**9)
    assert one.checkpoints == str(tmp_path / "checkpoints" / "one")
    assert one.policy == Policy(
        within=["rack", "switch"],
        quiet_ns=0,
        rebalance="when-free",
        stragglers="move",
        straggler_factor=2.5,
        straggler_after_ns=5 * 10**9,
        on_divergence="fall-back",
        hold_ns=one.stall_timeout_ns,
    )
    given = [spec.provision for spec in others]
    assert [by.scheduler for by in given if by is not None] == ["slurm", "kubernetes"]
    assert [sorted(by.places) for by in given if by is not None] == [
        [node.name for node in one.nodes]
    ] * 2


def test_what_launchers_submit_is_what_rest_takes(specs: list[JobSpec]) -> None:
    for launcher in LAUNCHERS.values():
        assert invoke([*launcher, *WORDS["job_id"], "train.py"]) == 0
    for spec in specs:
        assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec
        check_spec(spec)
        two = msgspec.structs.replace(spec, nodes=spec.nodes[:2], world=2, redundancy="parity")
        with pytest.raises(UsageError, match="--redundancy parity: a parity needs ranks on two"):
            check_spec(two)


def test_a_module_and_its_arguments_are_given_on(specs: list[JobSpec]) -> None:
    for launcher in LAUNCHERS.values():
        assert invoke([*launcher, "--nproc_per_node", "2", "-m", "train", "-m", "x"]) == 0
    assert [spec.script for spec in specs] == [["-m", "train", "-m", "x"]] * 3
    assert [spec.local_world for spec in specs] == [2, 2, 2], "torchrun's spelling"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--nproc-per-node 0", "--nproc-per-node is 0"),
        ("--spares -1", "--spares is -1"),
        ("--understudies 1", "--understudies 1 without a spare"),
        ("--redundancy parity", "--redundancy parity: a parity needs"),
        ("--redundancy none", "--redundancy"),
        ("--stall-timeout 0", "--stall-timeout is 0"),
        ("--stall-timeout nan", "--stall-timeout is nan"),
        ("--straggler-factor 1", "--straggler-factor is 1: it must be above 1"),
        ("--straggler-after 0", "--straggler-after is 0"),
        ("--quiet-after -1", "--quiet-after is -1"),
        ("--on-divergence fall-back", "--on-divergence fall-back: there are no checkpoints"),
        ("--inject kill:rank=9", "there is no rank 9"),
        ("--inject kill-node:node=n9", "there is no node n9"),
        ("--inject boom:rank=0", "--inject boom:rank=0"),
        ("--mttf 5", "--mttf without periodic checkpoints"),
        ("--checkpoint-interval 5", "--checkpoint-interval without periodic checkpoints"),
        ("--resume nowhere", "--resume nowhere: no such directory"),
        ("--within a=b", "label 'a=b'"),
        ("--job-id a/b", "cannot be an id"),
        ("--orchestrator nobody", "no live orchestrator nobody"),
    ],
)
def test_bad_words_are_refused_alike(
    words: str, said: str, specs: list[JobSpec], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--redundancy parity" in words:  # three nodes with ranks would do
        monkeypatch.setitem(LAUNCHERS, "run", ["run", "--local-nodes", "2"])
        for name in ("slurm", "kubernetes"):
            two = ["2" if word == "3" else word for word in LAUNCHERS[name]]
            monkeypatch.setitem(LAUNCHERS, name, two)
    refusals = []
    for launcher in LAUNCHERS.values():
        more = [] if "--job-id" in words else WORDS["job_id"]
        if launcher[0] == "run" and "--orchestrator" in words:
            continue  # it looks for it where it runs the job
        assert invoke([*launcher, *words.split(), *more, "train.py"]) == 2
        refusals.append(capsys.readouterr().err.replace(f"keepstep {launcher[0]} launch", "?"))
    assert not specs
    error, hint = refusals[0].splitlines()
    assert error.startswith("error: ") and said in error and hint.startswith("hint: ")
    assert {one.splitlines()[0] for one in refusals} == {error}


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_what_a_scheduler_cannot_honour_is_refused_by_name(
    name: str, specs: list[JobSpec], capsys: Captured
) -> None:
    assert invoke([*LAUNCHERS[name], "--mode", "transparent", "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: --mode transparent is not possible with `keepstep {name} launch`"
    assert hint.startswith("hint: keepstep run --mode transparent")
    assert not specs


@pytest.mark.parametrize(
    "words, said",
    [
        ("--nodes 0", "--nodes is 0"),
        ("--grace -1", "--grace is -1"),
        ("--back-after inf", "--back-after is inf"),
        ("--spare-timeout 0", "--spare-timeout is 0"),
        ("--replenish", "--replenish: there are no spare nodes"),
        ("--gpus-per-node many", "--gpus-per-node is many"),
        ("--replenish --spare-nodes 1 --no-idle", "by a scheduler only"),
    ],
)
@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_words_about_nodes_are_refused_alike(
    name: str, words: str, said: str, specs: list[JobSpec], capsys: Captured
) -> None:
    assert invoke([*LAUNCHERS[name], *words.split(), "train.py"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert said in error and hint.startswith("hint: ") and not specs
