"""`python -m keepstep.native`: compile the native parts ahead of time and print where they are."""

from __future__ import annotations

import sys

from keepstep.errors import KeepstepError
from keepstep.native import build, plugin, segments


def main() -> int:
    try:
        artifacts = build.ensure()
        network = plugin.ensure()
        memory = segments.ensure()
    except KeepstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(artifacts.extension)
    print(artifacts.store_host)
    print(network / plugin.NCCL_NAME)
    print(memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
