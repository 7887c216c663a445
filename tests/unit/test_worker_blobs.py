"""A rank and its buddy's blob server: what a buddy that is new gets to know."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.agent.blobs import BlobServer
from keepstep.model.messages import Address, BlobData, BlobGet
from keepstep.worker.blobs import BuddyLine, fetch


@contextmanager
def buddy() -> Iterator[tuple[Address, BlobServer]]:
    server = BlobServer("t", lambda rank: [])
    loop = asyncio.new_event_loop()
    address = loop.run_until_complete(server.start("127.0.0.1"))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def stop() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield address, server
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_new_buddy_gets_the_init_record_first() -> None:
    line = BuddyLine("t")
    with buddy() as (first, _), buddy() as (second, _):
        line.put(first, 2, -1, b"init", lambda: False)
        line.put(first, 2, 7, b"seven", lambda: False, b"init")
        line.put(second, 2, 8, b"eight", lambda: False, b"init")
        found = fetch([second], "t", 2, -1)
        assert isinstance(found, BlobData) and found.data == b"init"
        newest = fetch([second], "t", 2, -2)
        assert isinstance(newest, BlobData) and newest.tick == 8
        line.close()


def test_one_that_knows_the_rank_is_not_told_again() -> None:
    line = BuddyLine("t")
    with buddy() as (address, server):
        line.put(address, 2, 0, b"zero", lambda: False, b"init")
        line.put(address, 2, 1, b"one", lambda: False, b"another")
        kept = server.answer(BlobGet(token="t", rank=2, tick=-1))
        assert isinstance(kept, BlobData) and kept.data == b"init"
        line.close()
