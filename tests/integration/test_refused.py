"""What cannot be protected is refused by name, in real jobs (scripts/refused.py); and what looks
like it but is exact goes on through a kill, with the numbers of torchrun."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PLAIN, SCRIPTS, Job, command
from tests.support.job import inject

SCRIPT = str(SCRIPTS / "refused.py")
TENSOR_PARALLEL = str(SCRIPTS / "tensor_parallel.py")
HOOK, AFTER_BACKWARD = "allreduce_hook", "after backward()"
ADDS = "load_state_dict(state_dict()) must set everything"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Everything is refused, caught, and costs nothing: the honest steps after it are made."""
    job = Job(tmp_path_factory.mktemp("all"), "--nproc-per-node", "2", SCRIPT, "all")
    try:
        job.end(0)
        yield job
    finally:
        job.kill()


@pytest.mark.parametrize(
    ("case", "words", "hint"),
    [
        ("PowerSGD", ["powerSGD_hook", "keep state"], HOOK),
        ("post-local SGD hook", ["post_localSGD_hook", "keep state"], HOOK),
        ("a hook of its own", ["custom_hook", "keep state"], "keepstep_exact"),
        ("model averager", ["PeriodicModelAverager"], "every step"),
        ("local SGD", ["'0'", "PostLocalSGDOptimizer"], "every step"),
        ("ZeRO", ["'0'", "ZeroRedundancyOptimizer"], "fully_shard"),
        ("optimizer in backward", ["module.weight", "inside backward"], AFTER_BACKWARD),
        ("fused optimizer", ["inside backward"], AFTER_BACKWARD),
        ("manager", ["living child", "SyncManager"], "KEEPSTEP_BYSTANDER"),
        ("process", ["living child", "sys.stdin.read()"], "KEEPSTEP_BYSTANDER"),
        ("scheduler that adds", ["'scheduler'", "key num_steps 0 -> 1"], ADDS),
        ("registered that adds", ["'count'", "key num_steps 0 -> 1"], ADDS),
        ("RPC", ["rpc is initialised"], "collectives of torch.distributed"),
        ("hook after attach", ["powerSGD_hook", "keep state"], HOOK),
        ("Join", ["Join", "different numbers of steps"], "same number of batches"),
        ("averager after attach", ["PeriodicModelAverager"], "every step"),
        ("RPC after attach", ["init_rpc after attach"], "collectives of torch.distributed"),
        ("optimizer in backward after attach", ["inside backward"], AFTER_BACKWARD),
        ("register after attach", ["'late'", "key num_steps 0 -> 1"], ADDS),
        ("thread", ["all_reduce", "thread 'mine'"], "main thread"),
        ("update inside backward", ["SGD.step()", "inside backward"], AFTER_BACKWARD),
        ("functional after update", ["collective of group", "after the first optimizer update"],
         "@ks.section"),
    ],
)  # fmt: skip
def test_refused_by_name(refused: Job, case: str, words: list[str], hint: str) -> None:
    found = re.findall(r"^\[rank (\d)\] MISTAKE (.*)$", refused.out, re.MULTILINE)
    said = [(rank, json.loads(text)) for rank, text in found]
    mine = {rank: one for rank, one in said if one["case"] == case}
    assert sorted(mine) == ["0", "1"]
    for one in mine.values():
        assert one["refused"], one
        assert all(word in one["message"] for word in words) and hint in one["hint"], one


def test_refusals_cost_nothing(refused: Job) -> None:
    ends = re.findall(r"END rank (\d) step 6 agreed (\S+) sha256 (\w{64})", refused.out)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"]
    assert len({tuple(rest) for _, *rest in ends}) == 1, "both ranks have the same numbers"


def test_what_a_step_reads_and_no_newcomer_gets_is_named_once_per_rank(refused: Job) -> None:
    lines = refused.err.splitlines() + refused.out.splitlines()
    for words in (".marker is bound to other objects", "honest decides by the clock"):
        assert sum(words in line for line in lines) == 2, refused.err[-4000:]


@pytest.mark.parametrize(
    ("case", "error", "hint"),
    [
        (
            "adding",
            "load of 'scheduler' does not restore what it saved: key num_steps 0 -> 1",
            ADDS,
        ),
        ("child", "attach: the script has a living child process", "end it before attach"),
        ("backend", "backend other of group", "init_process_group"),
    ],
)
def test_refusal_at_attach_ends_the_job_with_exit_code_2(
    tmp_path: Path, case: str, error: str, hint: str
) -> None:
    job = Job(tmp_path, "--nproc-per-node", "2", SCRIPT, case)
    try:
        job.end(2)
        assert f"keepstep.errors.UsageError: {error}" in job.err, job.err
        assert re.search(rf"^hint: .*{re.escape(hint)}", job.err, re.MULTILINE), job.err
    finally:
        job.kill()


def ends(output: str) -> dict[str, Any]:
    found = re.findall(r"END rank (\d) step \d+ (agreed \S+ sha256 \w{64})", output)
    assert sorted(rank for rank, _ in found) == ["0", "1"], output
    return dict(found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command([*words, PLAIN, SCRIPT, "kept"], tmp_path_factory.mktemp("plain"))
    assert done.returncode == 0, done.stderr
    return ends(done.stdout)


KILL = ["--inject", "kill:rank=1,step=3,point=in_backward"]


def test_set_up_of_2_mib_fake_groups_and_exact_hooks_outlive_a_kill(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    job = Job(tmp_path, "--nproc-per-node", "2", "--spares", "1", *KILL, SCRIPT, "kept")
    try:
        job.end(0)
        (incident,) = job.cli_json("incidents")
        assert (incident["outcome"], incident["steps_lost"]) == ("RESOLVED", 0)
        assert ends(job.out) == plain
    finally:
        job.kill()


def test_spare_that_would_compute_otherwise_is_refused_and_another_one_is_taken(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    """And the launcher says why, beside the incident."""
    marker = tmp_path / "marker"
    options = ["--nproc-per-node", "2", "--spares", "2", *KILL]
    job = Job(tmp_path, *options, SCRIPT, "unlike", "--marker", str(marker))
    try:
        job.end(0)
        assert marker.exists(), "the first newcomer never came"
        (incident,) = job.cli_json("incidents")
        assert (incident["outcome"], incident["steps_lost"]) == ("RESOLVED", 0)
        why = "would compute otherwise than rank 1 did: torch threads 1 there and 3 here"
        assert why in incident["reason"]
        assert re.search(rf"^keepstep: note: .*{why}", job.err, re.MULTILINE), job.err
        assert ends(job.out) == plain
    finally:
        job.kill()


def tensor_parallel(output: str) -> dict[int, Any]:
    found = [json.loads(text) for text in re.findall(r"END (\{.*\})$", output, re.MULTILINE)]
    assert sorted(one["rank"] for one in found) == [0, 1], output
    return {one["rank"]: one for one in found}


def test_gradients_placed_otherwise_than_parameters_cause_no_collective_behind_the_fence(
    tmp_path: Path,
) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command([*words, PLAIN, TENSOR_PARALLEL], tmp_path)
    expected = tensor_parallel(done.stdout)
    assert expected[0]["unlike"], "all gradients are placed as their parameters: nothing is tested"
    kills = inject("kill:rank=1,step=2,point=in_optimizer", "kill:rank=1,step=4,point=in_backward")
    job = Job(tmp_path, "--nproc-per-node", "2", "--spares", "2", *kills, TENSOR_PARALLEL)
    try:
        job.end(0)
        ended = [(one["outcome"], one["steps_lost"]) for one in job.cli_json("incidents")]
        assert ended == [("RESOLVED", 0)] * 2
        assert tensor_parallel(job.out) == expected
    finally:
        job.kill()
