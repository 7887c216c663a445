"""A store that is closed while it is being opened leaves nothing watched behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

from keepstep.agent import stores


def test_the_number_of_a_closed_pipe_can_be_watched_by_somebody_else() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        number = process.stdout.fileno()
        reading = asyncio.create_task(stores._read_line(process))
        await asyncio.sleep(0)
        reading.cancel()
        read_end, write_end = os.pipe()
        stores._end(process)
        os.dup2(read_end, number)  # as the next descriptor gets it
        seen = asyncio.Event()
        loop.add_reader(number, seen.set)
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        os.write(write_end, b"x")
        await asyncio.wait_for(seen.wait(), 10)
        loop.remove_reader(number)
        for fd in (number, read_end, write_end):
            os.close(fd)

    asyncio.run(story())


def test_a_port_is_read_byte_by_byte() -> None:
    async def story() -> int:
        code = "import time\nfor x in '123\\n': print(x, end='', flush=True); time.sleep(0.01)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            return await stores._read_port(process, 30)

    assert asyncio.run(story()) == 123
