"""What it costs to keep shards that no other rank has in another node's memory.

Measured inside one run by alternating blocks (train/shards.py): steps that keep them, and twice
steps that do not. A rank per local node, so the vault is another process on the same machine: its
CPU time and the memory bandwidth of both are taken from the ranks, which machines of their own
would not do. With --mps all ranks are on the GPU at once (mps.py). With --alone the
first rank has the GPU nearly for itself, as in a cluster: the other's model is tiny, and they
share nothing.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import report
from benchmarks.drive import Keepstep
from benchmarks.mps import sharing

# Ranks, each on a node of its own, and nodes besides: one without a member keeps a parity.
WORLDS = {"buddy": (2, 0), "parity": (3, 1)}
SIZES = {
    "cpu": ["--rows", "8", "--tokens", "128"],
    # Ranks on one GPU take turns, and each collective costs some milliseconds.
    "cuda": ["--width", "512", "--layers", "6", "--vocabulary", "16000", "--rows", "8",
             "--tokens", "1024", "--micro", "20", "--block", "4"],
}  # fmt: skip
AT_ONCE = ["--rows", "32"]  # nobody waits for a turn: without more work steps would be short
# As many parameters as a rank of a large job has, and embedding and head as small beside them.
ALONE = ["--width", "768", "--layers", "16", "--vocabulary", "4096",
         "--rows", "64", "--tokens", "2048"]  # fmt: skip
# A step must be ten times as long as what it copies, and with a parity that is twice as much.
PASSES = {"buddy": 4, "parity": 7}


def measure(
    device: str, rounds: int, keep: str, mps: bool, alone: bool, passes: int | None
) -> dict[str, Any]:
    world, spares = WORLDS[keep]
    layout = ["--nproc-per-node", "1", "--local-nodes", str(world), "--spare-nodes", str(spares)]
    layout += ["--redundancy", keep, "--quiet"]
    arguments = ["--device", device, "--rounds", str(rounds), *SIZES[device]]
    if device == "cuda":
        arguments += AT_ONCE * mps + [*ALONE, "--micro", str(PASSES[keep])] * alone
    arguments += ["--alone"] * alone + ["--micro", str(passes)] * bool(passes)
    with sharing(at_once=mps), Keepstep(layout, "shards.py", arguments) as job:
        job.wait(1500)
        ranks = job.results(world)
    return {"keep": keep, **compare(ranks)}


def compare(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Per round, the mean over ranks; differences are formed inside a round, then summed up."""
    rounds = [
        {name: statistics.fmean(one[name] for one in same) for name in same[0]}
        for same in zip(*(rank["rounds"] for rank in ranks))
    ]
    off = [(one["off"] + one["control"]) / 2 for one in rounds]
    step_s = statistics.median(off)

    def ratio(differences: list[float]) -> dict[str, Any]:
        low, high = report.interval(differences)
        middle = statistics.median(differences)
        return {
            "median": 1 + middle / step_s,
            "interval95": [1 + low / step_s, 1 + high / step_s],
        }

    copy_s = max(rank["copy_alone_s"] for rank in ranks)
    per_rank = ("bytes_per_step", "vault_bytes", "vault_reserved", "parity_bytes", "pinned_bytes")
    return {
        "ranks": len(ranks),
        "device": ranks[0]["device"],
        "parameters": ranks[0]["parameters"],
        "units_per_rank": ranks[0]["units"],
        "steps_per_block": ranks[0]["block"],
        "step_s": step_s,
        "copy_alone_s": copy_s,
        "step_by_copy": step_s / copy_s,
        "ratio": ratio([one["kept"] - plain for one, plain in zip(rounds, off)]),
        "control_ratio": ratio([one["control"] - one["off"] for one in rounds]),
        **{what: max(rank[what] for rank in ranks) for what in per_rank},
        "per_round_s": rounds,
    }


def run(
    quick: bool,
    rounds: int | None = None,
    device: str = "cpu",
    keep: str = "buddy",
    mps: bool = False,
    alone: bool = False,
    passes: int | None = None,
) -> list[str]:
    provenance = report.Provenance()
    rounds = rounds or (2 if quick else 8)
    report.say(f"redundancy: {keep}, {device}{', MPS' * mps}, {rounds} rounds")
    result = measure(device, rounds, keep, mps, alone, passes)
    words = [device] * (device != "cpu") + [keep] * (keep != "buddy") + ["mps"] * mps
    words += ["alone"] * alone + [f"{passes}-passes"] * bool(passes)
    name = "-".join(["redundancy", *words])
    path = report.write(name, quick, provenance.close(), {"result": result})
    return [summary(result), f"written: {path.name}"]


def summary(result: dict[str, Any]) -> str:
    def shown(one: dict[str, Any]) -> str:
        low, high = one["interval95"]
        return f"{one['median']:.4f} ({low:.4f} .. {high:.4f})"

    mb = 1 / 2**20
    rows = [
        ["parameters", f"{result['parameters'] / 1e6:.1f} M on {result['ranks']} ranks"],
        ["step without", f"{1e3 * result['step_s']:.1f} ms"],
        ["the copy alone", f"{1e3 * result['copy_alone_s']:.1f} ms"],
        ["step / copy", f"{result['step_by_copy']:.1f}"],
        ["step-time ratio, 95 %", shown(result["ratio"])],
        ["off against off, 95 %", shown(result["control_ratio"])],
        ["to vaults, per step and rank", f"{mb * result['bytes_per_step']:.1f} MiB"],
        ["held by the vault, per rank", f"{mb * result['vault_bytes']:.1f} MiB"],
        ["held by the parity, per group", f"{mb * result['parity_bytes']:.1f} MiB"],
        ["pinned in the rank", f"{mb * result['pinned_bytes']:.1f} MiB"],
    ]
    return report.table("", (result["keep"], result["device"]), rows)
