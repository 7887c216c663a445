"""Writes docs/reference/zoo.md from a report: python tests/zoo/page.py REPORT.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "zoo.md"

HEAD = """# The zoo: what comes out of scripts as people write them

`tests/zoo/scripts` has small training scripts in the styles of public code, with what makes them
treacherous: code between steps, counters of their own, generators of their own, weights changed
outside the optimizer. Each uses Keepstep as the [quickstart](../guides/quickstart.md) tells and
nothing more. Each is run once under plain torchrun and once under `keepstep run`, where ranks are
killed one after another at different points, also between steps. The outcome is one of

* **identical**: every incident is RESOLVED, and parameters, buffers, optimizers, learning rates,
  random states, the script's own variables and every loss on every rank equal those of plain
  torchrun, bit by bit;
* **refused**: Keepstep names the reason and a cure before the first step;
* **stopped**: a witness ends the job and names what differs.

`--fsdp` in a name: the same script with `fully_shard` on two ranks, where no rank has a copy of
another's shards.
"""


def rows(scripts: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| script | style | treacherous | kills | outcome | reason |"
    yield "|---|---|---|---|---|---|"
    for name, one in sorted(scripts.items()):
        outcome = one["outcome"]
        if outcome != one["expected"]:
            outcome = f"**{outcome}** (expected: {one['expected']})"
        cells = [f"`{name}`", one["style"], one["treacherous"], str(one["kills"]), outcome]
        cells.append(one["why"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(report: dict[str, Any]) -> str:
    counted = ", ".join(f"{count} {kind}" for kind, count in report["outcomes"].items())
    said = (
        f"{len(report['scripts'])} runs: {counted}; {report['kills']} kills. Commit "
        f"{report['commit']}, {report['date']}, torch {report['torch']}, numpy {report['numpy']}, "
        f"Python {report['python']}, {report['machine']}. `{report['command']}`, then "
        "`python tests/zoo/page.py`.\n"
    )
    return "\n".join([HEAD, said, *rows(report["scripts"]), ""])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/zoo/page.py REPORT.json")
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())))
