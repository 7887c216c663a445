"""python -m benchmarks [PART] [--quick]; without PART all of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable

from benchmarks import (
    collectives,
    gpu,
    memory,
    network,
    overhead,
    pause,
    redundancy,
    report,
    restart,
    scale,
    schedulers,
    transfer,
    transparent,
)

PARTS: dict[str, Callable[..., list[str]]] = {
    "overhead": overhead.run,
    "pause": pause.run,
    "restart": restart.run,
    "memory": memory.run,
    "scale": scale.run,
    "transfer": transfer.run,
    "gpu": gpu.run,
    "collectives": collectives.run,
    "network": network.run,
    "redundancy": redundancy.run,
    "schedulers": schedulers.run,
    "transparent": transparent.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="few repetitions, not to be published")
    parser.add_argument("--repeats", type=int, help="pause: incidents of each kind and script")
    parser.add_argument("--script", choices=[*pause.SCRIPTS, "all"], default="all",
                        help="pause: which script")  # fmt: skip
    parser.add_argument("--parallel", type=int, default=1,
                        help="pause: jobs at a time (four cores for each)")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="the other parts: rounds of measurement")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="redundancy: cuda puts all ranks on one GPU")  # fmt: skip
    parser.add_argument("--mps", action="store_true",
                        help="collectives, redundancy: ranks are on the GPU at once")  # fmt: skip
    parser.add_argument("--alone", action="store_true",
                        help="redundancy: one rank trains, the other hardly")  # fmt: skip
    parser.add_argument("--passes", type=int, help="redundancy: backward passes of a step")
    parser.add_argument("--keep", choices=["buddy", "parity"], default="buddy",
                        help="redundancy: which kind")  # fmt: skip
    parser.add_argument("--adapter", choices=["local", "slurm", "kubernetes"], default="local",
                        help="schedulers: which one")  # fmt: skip
    args = parser.parse_args()
    # As an exception, so that jobs under way are ended with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load = os.getloadavg()
    if not report.quiet_enough(load):
        report.say(
            f"warning: load average {load[0]:.1f}: other work runs here, the figures will show it"
        )
    for part in PARTS if args.part == "all" else [args.part]:
        options = (
            {"repeats": args.repeats, "script": args.script, "parallel": args.parallel}
            if part == "pause"
            else {"rounds": args.rounds}
        )
        if part == "redundancy":
            options |= {"device": args.device, "keep": args.keep}
            options |= {"mps": args.mps, "alone": args.alone, "passes": args.passes}
        if part == "collectives":
            options["mps"] = args.mps
        if part == "schedulers":
            options["adapter"] = args.adapter
        for text in PARTS[part](args.quick, **options):
            print(text + "\n", flush=True)


if __name__ == "__main__":
    main()
