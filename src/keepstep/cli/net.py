"""`keepstep net`: the network plugin's environment, and the paths of a job."""

from __future__ import annotations

import shlex
import sys

import click

from keepstep.cli import find, show
from keepstep.cli.operate import json_option, which_options
from keepstep.cli.surroundings import home
from keepstep.net.environment import network


@click.group(short_help="The network plugin: its environment, and paths.")
def net() -> None:
    """Collectives that survive links: the plugin for NCCL and RCCL."""


@net.command()
@click.option("--tcp", is_flag=True, help="The plugin even where RDMA devices are.")
@json_option
def env(tcp: bool, as_json: bool) -> None:
    """Print what a rank's environment needs: eval "$(keepstep net env)"."""
    found = network("tcp" if tcp else "auto")
    show.words(found.words)
    if as_json:
        show.print_json(found.variables)
        return
    for name, value in found.variables.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


@net.command()
@which_options
@json_option
def status(which: find.Which, as_json: bool) -> None:
    """Show the paths of a job's nodes: traffic, repairs, faults."""
    view = find.one_job(home(), which).view
    nodes = {node.node: node.paths for node in view.nodes}
    if as_json:
        show.print_json(nodes)
        return
    show.print_paths(nodes)
    if not any(nodes.values()):
        show.words("no process of this job uses the plugin: start it with `keepstep run --net`")
