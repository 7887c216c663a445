"""Each script of the zoo once under plain torchrun and once under `keepstep run` with kills.

A job of a script gets its kills one after another, in different steps and at different points, on
both ranks. One spare stands by; after a kill the slot of the dead process arms the next one, and a
kill that comes before it is armed makes the job hold until it is. What comes out is one of

identical  the job ended by itself, every kill fired, every incident is RESOLVED without a lost
           step, and the result files of all ranks are those of plain torchrun, bit by bit
refused    exit code 2 before the first step was committed, with a hint
stopped    a witness said what differs: an incident is DIVERGED, and the job held
wrong      the job says that all is well, and numbers differ: what the zoo is there to find
failed     anything else: another exit code, a lost step, a kill that never fired, no end

The first three are what Keepstep promises; `expected.toml` says which of them a script is to have.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.native.build import cache_folder
from tests.support.changes import differing, in_parent
from tests.support.job import Job
from tests.support.scripts import ROOT, TESTS
from tests.support.torchrun import run_plain

HERE = TESTS / "zoo"
SCRIPTS = HERE / "scripts"
EXPECTED = HERE / "expected.toml"
MUTANTS = HERE / "mutants.toml"
SOURCE = ROOT / "src" / "keepstep"
WORLD = 2
STILL_S = 90.0  # nothing of a job changes for so long: it hangs
MOVING = ("state", "committed_step", "last_incident", "injects_fired", "ranks", "spares")
FINDING_OUT = "numbers differ between ranks: finding out which"
STOPPED_CODES = (5, 3)  # by itself after the stall timeout; by `keepstep stop` while it holds
PROMISED = ("identical", "refused", "stopped")


@dataclass(frozen=True)
class Case:
    """One line of the table: a script, with or without --fsdp."""

    name: str
    script: Path
    options: tuple[str, ...]
    expected: str
    why: str
    kills: tuple[str, ...]
    style: str
    treacherous: str


@dataclass
class Outcome:
    kind: str
    detail: str = ""
    kills: int = 0
    incidents: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def cases() -> list[Case]:
    """All scripts, in the order of their names; every script has a line in the table."""
    table = tomllib.loads(EXPECTED.read_text())
    default = table.pop("default")
    found = []
    scripts = {path.stem: path for path in SCRIPTS.glob("*.py") if path.stem != "zoolib"}
    unknown = {name.removesuffix("--fsdp") for name in table} ^ set(scripts)
    if unknown:
        raise AssertionError(f"expected.toml and scripts/ do not fit: {sorted(unknown)}")
    for name in sorted(table):
        line = {**default, **table[name]}
        if line["outcome"] not in PROMISED:
            raise AssertionError(f"{name}: outcome {line['outcome']!r} is none of {PROMISED}")
        if line["outcome"] != "identical" and not line.get("why"):
            raise AssertionError(f"{name}: why is it not identical?")
        path = scripts[name.removesuffix("--fsdp")]
        style, _, treacherous = (ast.get_docstring(ast.parse(path.read_text())) or "").partition(
            "\n\n"
        )
        found.append(
            Case(
                name=name,
                script=path,
                options=("--fsdp",) if name.endswith("--fsdp") else (),
                expected=line["outcome"],
                why=line.get("why", ""),
                kills=tuple(line["kills"] + line.get("more_kills", [])),
                style=" ".join(style.split()),
                treacherous=" ".join(treacherous.split()),
            )
        )
    return found


def _key(case: Case) -> str:
    """Of everything that plain numbers depend on."""
    import numpy
    import torch

    digest = hashlib.sha256()
    for path in (case.script, SCRIPTS / "zoolib.py"):
        digest.update(path.read_bytes())
    versions = (platform.python_version(), torch.__version__, numpy.__version__, case.options)
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability())
    digest.update(repr((versions, processor)).encode())
    return digest.hexdigest()[:20]


def plain(case: Case) -> list[dict[str, Any]]:
    """The results under plain torchrun, computed once and kept in the cache folder."""
    folder = cache_folder().parent / "zoo"
    kept = folder / f"{case.name}-{_key(case)}.json"
    if kept.exists():
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found
    base = Path(tempfile.mkdtemp(prefix="keepstep-zoo-"))
    try:
        results = run_plain(base / "out", WORLD, list(case.options), case.script)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_name(f"{kept.name}.{os.getpid()}")
    fresh.write_text(json.dumps(results))
    fresh.rename(kept)
    return results


def start(case: Case, source: Path | None = None) -> Job:
    options = ["--nproc-per-node", str(WORLD), "--spares", "1"]
    for kill in case.kills:
        rank, step, point = kill.split()
        options += ["--inject", f"kill:rank={rank},step={step},point={point}"]
    script_args = list(case.options)
    return Job(*options, script=case.script, script_args=script_args, world=WORLD, source=source)


def judge(case: Case, job: Job) -> Outcome:
    """Waits for the job's end and says what came out."""
    began = time.monotonic()
    outcome = _judge(case, job)
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.kills = len(job.last.injects_fired) if job.last is not None else 0
    return outcome


class Run(NamedTuple):
    job: Job
    outcome: Outcome


def run_script(case: Case, source: Path | None = None) -> Run:
    job = start(case, source)
    try:
        return Run(job, judge(case, job))
    finally:
        job.kill()
        job.log.close()


def changed_names() -> set[str]:
    """Scripts and mutants that the commit has changed, by their own text or by their row."""
    scripts = differing(SCRIPTS)
    found = {case.name for case in cases() if case.script in scripts}
    for table in (EXPECTED, MUTANTS):
        old, new = (tomllib.loads(text) for text in (in_parent(table), table.read_text()))
        found |= {name for name, row in new.items() if old.get(name) != row}
    return found


@dataclass(frozen=True)
class Mutant:
    """A fault in the worker, and the script that is to find it."""

    name: str
    file: str
    old: str
    new: str
    case: Case


def mutants() -> list[Mutant]:
    known = {case.name: case for case in cases()}
    found = []
    for name, line in tomllib.loads(MUTANTS.read_text()).items():
        case = replace(known[line["script"]], kills=tuple(line["kills"]))
        found.append(Mutant(name, line["file"], line["old"], line["new"], case))
    return found


def run_mutant(mutant: Mutant) -> Run:
    base = Path(tempfile.mkdtemp(prefix="keepstep-mutant-"))
    try:
        plain(mutant.case)
        shutil.copytree(SOURCE, base / "keepstep", ignore=shutil.ignore_patterns("__pycache__"))
        path = base / "keepstep" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has changed"
        path.write_text(text.replace(mutant.old, mutant.new))
        return run_script(mutant.case, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _hangs(job: Job) -> str:
    """Waits for the end; what the ranks were doing if it does not come."""
    told, last, since = False, "", time.monotonic()
    while job.process.poll() is None:
        view = job.look()
        named = view is not None and view.divergence not in ("", FINDING_OUT)
        if named and not told:  # it holds until somebody decides
            told = True
            job.cli("stop", "--job", job.job)
        now = repr([getattr(view, name, None) for name in MOVING])
        if now != last:
            last, since = now, time.monotonic()
        if time.monotonic() > since + STILL_S:
            return job.stuck()[:5000]
        time.sleep(0.1)
    return ""


def _judge(case: Case, job: Job) -> Outcome:
    hanging = _hangs(job)
    if hanging:
        return Outcome("failed", f"hangs: {hanging}")
    code = job.process.returncode
    incidents = job.incidents() if job.job else []
    seen = [
        {
            "victims": one.victims,
            "decision": one.decision,
            "outcome": one.outcome,
            "lost": one.steps_lost,
            "pause_ms": round(one.pause_ms),
        }
        for one in incidents
    ]
    said = job.output()
    if code in STOPPED_CODES and any(one.outcome == "DIVERGED" for one in incidents):
        return Outcome("stopped", _said(said), incidents=seen)
    if code == 2 and (job.last is None or job.last.committed_step <= 0) and "hint:" in said:
        return Outcome("refused", _said(said), incidents=seen)
    if code != 0 and "keepstep.errors.UsageError" in said and "hint:" in said:
        return Outcome("stopped", _said(said), incidents=seen)  # by a check that names the reason
    if code != 0:
        return Outcome("failed", f"exit code {code}\n{said[-3000:]}", incidents=seen)
    if any(one.outcome != "RESOLVED" or one.steps_lost for one in incidents):
        return Outcome("failed", f"exit code 0, but {seen}", incidents=seen)
    if silent := job.unfired():
        return Outcome("failed", f"kills that never fired: {silent}", incidents=seen)
    different = differences(job.results(), plain(case))
    if different:
        return Outcome("wrong", "; ".join(different), incidents=seen)
    return Outcome("identical", incidents=seen)


def _said(output: str) -> str:
    """The sentence and the hint, from what the launcher printed."""
    lines = [line.strip() for line in output.splitlines() if "rror: " in line or "hint:" in line]
    lines += [line.strip() for line in output.splitlines() if "DIVERGED" in line]
    return " ".join(dict.fromkeys(lines))[:600]


def differences(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """What differs on which rank; empty means bit-identical."""
    found = []
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for part in sorted({*mine, *theirs}):
            if mine.get(part) != theirs.get(part):
                found.append(f"rank {rank}: {_where(part, mine.get(part), theirs.get(part))}")
    return found


def _where(path: str, mine: Any, theirs: Any) -> str:
    """The first place in a tree of results at which two of them differ."""
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            return f"{path} has {len(mine)} entries, not {len(theirs)}"
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    elif isinstance(mine, dict) and isinstance(theirs, dict) and set(mine) == set(theirs):
        pairs = [(name, mine[name], theirs[name]) for name in mine]
    else:
        return f"{path} is {str(mine)[:40]}, not {str(theirs)[:40]}"
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    more = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    name, a, b = unequal[0]
    return _where(f"{path}.{name}", a, b) + more
