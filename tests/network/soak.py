"""`make net-soak`: as many faults as asked for, over several networks; writes a report."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.network.faults import soak
from tests.network.rig import rig, why_not

# Paths, family, switched, ABI, helpers: each gets an equal share of the faults.
SHAPES = [
    (2, False, False, 11, "1"),
    (3, False, True, 8, "0"),
    (2, True, False, 6, "0"),
    (4, False, False, 11, "1"),
]
PER_RUN = 25  # then a new pair, so that beginnings and ends are tested too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    fired: dict[str, int] = {}
    runs, begun, commit, text = 0, time.monotonic(), _commit(), ""
    traffic = dict.fromkeys(
        ["messages", "bytes", "corrupt", "missing", "resent_chunks", "path_losses"], 0
    )
    while (done := sum(fired.values())) < given.faults:
        paths, v6, switched, abi, helpers = SHAPES[runs % len(SHAPES)]
        with (
            tempfile.TemporaryDirectory(prefix="n") as home,
            rig(Path(home), paths=paths, v6=v6, switched=switched) as made,
        ):
            count = min(PER_RUN, given.faults - done)
            words = ("--abi", str(abi), "--verify", "2")
            told = soak(made, count, given.seed + runs, *words, helpers=helpers)
            for kind, times in told.fired.items():
                fired[kind] = fired.get(kind, 0) + times
            for name in ("messages", "bytes", "corrupt", "missing"):
                traffic[name] += getattr(told, name)
            traffic["path_losses"] += len(made.heard("path-down"))
            latest = {(e["harness"], e["path"]): e["resent_chunks"] for e in made.heard("stats")}
            traffic["resent_chunks"] += sum(latest.values())
        runs += 1
        report = {
            "command": f"python -m tests.network.soak --faults {given.faults} --seed {given.seed}",
            "commit": commit,
            "machine": f"{platform.machine()}, Linux {platform.release()}",
            "faults": sum(fired.values()),
            "by_kind": dict(sorted(fired.items())),
            "runs": runs,
            "seconds": round(time.monotonic() - begun),
            **traffic,
        }
        text = json.dumps(report, indent=2)
        if given.report:  # each time: one that is stopped early says how far it came
            given.report.write_text(text + "\n")
        print(f"{report['faults']} faults in {report['seconds']} s", file=sys.stderr)
    print(text)
    return 0


def _commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
