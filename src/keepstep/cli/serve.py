"""`keepstep orchestrator`: one that outlives jobs, on this machine or for several."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import click

from keepstep.cli import show
from keepstep.cli.home import home
from keepstep.orchestrator.main import Orchestrator


@click.command()
@click.option("--id", "id_", required=True, metavar="NAME", help="Same name again: a restart.")
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Address to listen on; beyond loopback everything is TLS.",
)  # fmt: skip
@click.option("--port", type=int, default=0, help="REST [default: as before, else any].")
@click.option("--stream-port", type=int, default=0, help="Agents [default: as before, else any].")
def orchestrator(id_: str, host: str, port: int, stream_port: int) -> None:
    """Run an orchestrator for `keepstep run --orchestrator NAME`."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.exit(asyncio.run(_orchestrate(id_, host, port, stream_port)))


async def _orchestrate(id_: str, host: str, port: int, stream_port: int) -> int:
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    running = await Orchestrator.start(
        home(), id=id_, host=host, port=port, stream_port=stream_port
    )
    running.driver.failed.add_done_callback(lambda _: end.set())
    show.words(f"orchestrator {id_} at {running.url}, agents at port {running.stream.port}")
    if running.url.startswith("https:"):
        show.words(f"nodes join with a token: keepstep token create --orchestrator {id_}")
    try:
        await end.wait()
    finally:
        await running.stop()
    return 3 if running.driver.failed.done() else 0
