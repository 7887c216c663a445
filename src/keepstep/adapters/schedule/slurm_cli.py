"""Slurm's commands: run, and read by fields that are named in the question.

Nothing here depends on the layout of a release's own tables or JSON. What a command refuses is
told apart by its words, which have been the same for many releases; whatever is not known is
something that may work later.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Literal, get_args

from keepstep.errors import NoRight, TransientError, UsageError
from keepstep.model.schedule import Kind, Lease, Place

COMMAND_S = 30.0
TAG = "keepstep"
ADOPTED = "adopted"  # in the place of a kind
MARK = "keepstep: "  # how our reasons begin
FLAGS = "*~#!%$@^-+"  # behind a node's state: not responding, powering down and so on
LABEL = re.compile(r"(rack|switch|nvlink)[:=]([A-Za-z0-9][A-Za-z0-9._/-]*)")
DENIED = re.compile(r"invalid user id|permission|access.*denied|not authorized", re.IGNORECASE)
WRONG = re.compile(
    r"invalid (partition|account|qos|feature|reservation|gres|generic)|not available\b|not found",
    re.IGNORECASE,
)


def me() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def environment() -> dict[str, str]:
    """Without what an allocation around us says: it is not the one that we mean."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SALLOC_", "SBATCH_", "SRUN_")) or name == "SLURM_CONF"
    }


def run(*command: str) -> str:
    """Its stdout."""
    done = attempt(*command)
    if done.returncode != 0:
        raise refusal(command, done.stderr or done.stdout)
    return done.stdout


def attempt(*command: str) -> subprocess.CompletedProcess[str]:
    # `scontrol` leaves a script where it runs when it makes an allocation smaller.
    litters = command[:2] == ("scontrol", "update")
    with tempfile.TemporaryDirectory() if litters else contextlib.nullcontext("/") as folder:
        try:
            return subprocess.run(
                command,
                env=environment(),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no {command[0]} on this machine",
                hint="Slurm's commands must be in PATH where the orchestrator runs",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise TransientError(f"{command[0]} did not answer within {COMMAND_S:g} s") from error


def refusal(command: Sequence[str], said: str) -> NoRight | UsageError | TransientError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = re.sub(r"^(\w+: )?(error: )?", "", lines[-1]) if lines else "no reason given"
    if DENIED.search(said):
        return NoRight(f"Slurm refuses {command[0]}: {words}", hint="it needs an operator's rights")
    if WRONG.search(said):
        return UsageError(f"Slurm refuses the request: {words}", hint="see sinfo and --help")
    return TransientError(f"{command[0]}: {words}")


def read_places() -> dict[str, Place]:
    found: dict[str, Place] = {}
    for line in run("sinfo", "-h", "-N", "-a", "-o", "%N|%T|%G|%f|%E").splitlines():
        name, state, gres, features, reason = line.split("|", 4)
        ours = reason.startswith(MARK)
        found[name] = Place(
            name=name,
            state=_state(state),
            reason="" if reason == "none" else reason,
            ours=ours,
            gpu_type=gpu_type(gres),
            labels=labels(features),
        )
    return found


def labels(features: str) -> dict[str, str]:
    """Of "h200,rack:r1,nvlink:d3": features that say where a node stands."""
    return {found[1]: found[2] for one in features.split(",") if (found := LABEL.fullmatch(one))}


def _state(word: str) -> Literal["free", "used", "degraded", "down"]:
    plain = word.rstrip(FLAGS).lower()
    if plain in ("idle", "reserved"):
        return "free" if "*" not in word else "used"  # it does not answer at the moment
    if plain in ("allocated", "mixed", "completing", "planned"):
        return "used"
    return "degraded" if plain in ("draining", "drained") else "down"


def gpu_type(gres: str) -> str:
    """Of "gpu:h200:4(S:0-1)"; empty without GPUs or without a type."""
    found = re.search(r"gpu:([A-Za-z_][\w.-]*)", gres)
    return found.group(1) if found else ""


def read_leases(states: str) -> list[Lease]:
    """Of this user, by the comment that each of ours has."""
    words = ("squeue", "-h", "-a", "-u", me(), "-t", states, "-o", "%i|%N|%k")
    found: list[Lease] = []
    for line in run(*words).splitlines():
        id, places, comment = line.split("|", 2)
        tag = comment.split(":")
        if tag[0] != TAG or len(tag) < 4:
            continue
        found.append(
            Lease(
                id=id,
                job=tag[1],
                op=tag[2],
                kind=_kind(tag[3]),
                places=expand(places),
                instead_of=tag[4] if len(tag) > 4 else "",
                adopted=tag[3] == ADOPTED,
            )
        )
    return found


def _kind(word: str) -> Kind:
    return next((kind for kind in get_args(Kind) if kind == word), "queue")


def expand(places: str) -> list[str]:
    """ "c[1-2]" -> ["c1", "c2"]"""
    if not places or places == "(null)":
        return []
    if "[" not in places:
        return places.split(",")
    return run("scontrol", "show", "hostnames", places).split()


def reserved() -> dict[str, list[str]]:
    """Reservations and their nodes."""
    found: dict[str, list[str]] = {}
    for line in run("scontrol", "-o", "show", "reservation").splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "ReservationName" in fields:
            found[fields["ReservationName"]] = expand(fields.get("Nodes", ""))
    return found


def read_job(allocation: str) -> dict[str, str]:
    """What `scontrol` says about it, by the names it uses; only values without spaces."""
    if not allocation.isascii() or not allocation.isdigit():
        raise UsageError(f"{allocation!r} is no job id of Slurm", hint="a number, as of squeue")
    done = attempt("scontrol", "-o", "show", "job", allocation)
    said = done.stdout
    if "invalid job id" in done.stderr.lower():
        raise UsageError(f"Slurm has no job {allocation}", hint="see squeue --me")
    if done.returncode != 0:
        raise refusal(("scontrol",), done.stderr)
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


def read_steps(allocation: str, places: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Ids and names of those that run; with `places` in one of those only. That of a node which
    was lost stays listed for as long as its allocation."""
    said = run("squeue", "-h", "-s", "-j", allocation, "-o", "%i|%N|%j")
    rows = [line.split("|", 2) for line in said.splitlines()]
    return [(id, name) for id, place, name in rows if not places or place in places]


def is_operator() -> bool:
    """May this user change nodes and reservations?"""
    user = me()
    config = run("scontrol", "show", "config")
    owner = re.search(r"^SlurmUser\s*=\s*(\S+?)\(", config, re.MULTILINE)
    if user == "root" or (owner is not None and owner.group(1) == user):
        return True
    said = attempt("sacctmgr", "-n", "-P", "show", "user", user, "format=AdminLevel")
    return said.stdout.strip().lower() in ("operator", "administrator")
