"""Options of all suites and fixtures of several: jobs with their verdict, and a real PostgreSQL
server, private, and gone at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import sampling
from tests.support.job import Job, ending
from tests.support.postgres import Postgres, server_programs
from tests.support.reporting import Suite
from tests.support.verdict import Verdict


def pytest_addoption(parser: pytest.Parser) -> None:
    """Those of all suites: from the root of the repository pytest looks for options only here."""
    add = parser.addoption
    add("--suite-report", default="", help="write how each test ended to this file")
    add("--chaos-all", action="store_true", help="every cell, not a sample")
    add("--chaos-part", default="1/1", help="I/N: every Nth cell, from the Ith on")
    add("--chaos-report", default="", help="write a JSON report here")
    add("--chaos-seed", default="", help="instead of the commit id")
    add("--gpu-report", default="", help="write a JSON report here")
    add("--sim-all", action="store_true", help="every world and every mutant, not a sample")
    add("--sim-seed", default="", help="draw the sample by this, not by the commit id")
    add("--transparent-all", action="store_true", help="every cell, not a sample")
    add("--zoo-all", action="store_true", help="every script, not a sample")
    add("--zoo-report", default="", help="write a JSON report here")
    add("--mutants-report", default="", help="write a JSON report of mutants here")
    add("--zoo-beside", type=int, default=1, help="so many scripts at a time")
    add("--zoo-seed", default="", help="draw the sample by this, not by the commit id")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--suite-report"):
        config.pluginmanager.register(Suite(Path(path).resolve()))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """What is left out, and how to run it; what is skipped stands at the end with its reasons."""
    return config.stash.get(sampling.said, [])


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Iterator[list[Job]]:
    """That a test has started: they end with it."""
    with ending(request) as started:
        yield started


@pytest.fixture
def verdict(request: pytest.FixtureRequest, jobs: list[Job]) -> Verdict:
    return Verdict(request.node.name, jobs)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A case that has come to its end has given its verdict."""
    result = yield
    made = pyfuncitem.funcargs.get("verdict")
    if isinstance(made, Verdict):
        made.must_be_given()
    return result


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'keepstep[postgres]'")
    programs = server_programs()
    if programs is None:
        pytest.skip("needs a PostgreSQL server: Debian's package postgresql (make setup-postgres)")
    server = Postgres(programs)
    try:
        yield server
    finally:
        server.remove()
