"""Every cell of the chaos suite, in several processes side by side, for machines with many cores:

    python tests/chaos/parts.py --parts 7 --report benchmarks/results/chaos-full.json

A part takes about two cores. What it prints goes to a file beside the report, whose name ends in
the number of the part; the reports become one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    for part in range(1, args.parts + 1):
        path = args.report.with_suffix(f".{part}")
        words = ["--chaos-all", "--chaos-part", f"{part}/{args.parts}", "--chaos-report", str(path)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
        with path.with_suffix(f".{part}.log").open("wb") as log:
            process = subprocess.Popen([*command, *words], stdout=log, stderr=subprocess.STDOUT)
        running.append((path, process))
    failed = [path.suffix for path, process in running if process.wait() != 0]
    reports = [json.loads(path.read_text()) for path, _ in running if path.exists()]
    if reports:
        args.report.write_text(json.dumps(merged(reports), indent=1) + "\n")
        for path, _ in running:
            path.unlink(missing_ok=True)
    print(f"{len(reports)} of {args.parts} parts have a report; failed: {failed or 'none'}")
    return 1 if failed else 0


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    whole = dict(reports[0])
    for name in ("cells", "faults", "bit_identical"):
        whole[name] = sum(report[name] for report in reports)
    whole["command"] = f"python tests/chaos/parts.py --parts {len(reports)}"
    whole["exit_status"] = max(report["exit_status"] for report in reports)
    whole["report"] = [entry for report in reports for entry in report["report"]]
    return whole


if __name__ == "__main__":
    sys.exit(main())
