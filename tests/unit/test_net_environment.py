"""Which environment a rank gets, on machines with and without RDMA devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.run import run
from keepstep.errors import UsageError
from keepstep.native import plugin
from keepstep.net import environment, rdma


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "ensure", lambda: Path("/cache/net"))


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
    return tmp_path


def test_on_ethernet_the_plugin_is_forced_so_that_a_failed_load_is_an_error(tmp_path: Path) -> None:
    found = environment.network("auto", tmp_path / "none")
    assert found.kind == "plugin"
    assert found.variables["NCCL_NET"] == "Keepstep"
    assert found.variables["NCCL_NET_PLUGIN"] == "/cache/net/libnccl-net-keepstep.so"


def test_rccl_gets_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_rocm", lambda: True)
    found = environment.network("auto", tmp_path / "none")
    assert found.variables["NCCL_NET_PLUGIN"].endswith("/librccl-net-keepstep.so")


def test_rdma_is_never_replaced_by_accident(infiniband: Path) -> None:
    with pytest.raises(UsageError, match="mlx5_0, mlx5_1"):
        environment.check_mode("auto", infiniband)
    environment.check_mode("tcp", infiniband)
    assert environment.network("tcp", infiniband).kind == "plugin"


@pytest.mark.parametrize(
    "version,names",
    [
        ((2, 28), []),
        ((2, 29), ["NCCL_IB_RESILIENCY_PORT_FAILOVER"]),
        ((2, 30), ["NCCL_IB_RESILIENCY_PORT_FAILOVER", "NCCL_IB_RESILIENCY_PORT_RECOVERY"]),
    ],
)
def test_nccls_own_failover_is_switched_on_where_it_exists(
    infiniband: Path, version: tuple[int, int], names: list[str]
) -> None:
    found = environment.network("auto", infiniband, version)
    assert (found.kind, sorted(found.variables)) == ("rdma", names)
    assert all(value == "1" for value in found.variables.values())


def test_ports_are_read_from_sys(infiniband: Path) -> None:
    assert [(p.name, p.active) for p in rdma.ports(infiniband)] == [
        ("mlx5_0/1", True),
        ("mlx5_1/1", False),
    ]


def test_a_worker_gains_nothing_unless_asked() -> None:
    assert environment.worker_network({}, Path("/a")) == {}
    asked = environment.worker_network({"KEEPSTEP_NET": "tcp"}, Path("/a"))
    assert asked["KEEPSTEP_NET_AGENT"] == "/a" and asked["NCCL_NET"] == "Keepstep"


@pytest.mark.parametrize(
    "words,net,rest",
    [
        (["--net", "train.py", "--net"], "auto", ("--net",)),
        (["--net=tcp", "--spares", "1", "train.py"], "tcp", ()),
        (["--spares", "1", "-q", "--net", "train.py", "x"], "auto", ("x",)),
        (["train.py", "--net", "y"], None, ("--net", "y")),
    ],
)
def test_net_alone_never_takes_the_script_for_its_value(
    words: list[str], net: str | None, rest: tuple[str, ...]
) -> None:
    # click keeps the first help option that it makes: it has to be the command line's own.
    context = run.make_context("run", list(words), help_option_names=["-h", "--help"])
    assert (context.params["net"], context.params["args"]) == (net, rest)
    assert context.params["script"] == "train.py"
