"""What optimizers and registered objects keep outside of their state_dict, and packages."""

from __future__ import annotations

import collections
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from keepstep.worker.script import attributes, frames, graph, roots
from keepstep.worker.script.attributes import Attribute
from keepstep.worker.script.discovery import HELPERS_MAX, Discovery
from keepstep.worker.script.namespaces import FunctionNames
from keepstep.worker.script.torch_names import RegisteredNames
from keepstep.worker.script.unasked import Unasked
from keepstep.worker.script.variables import Variables
from keepstep.worker.state import codec


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.t = 0
        self.moments = [torch.zeros(3)]
        self.parameters = list(parameters)
        self.note = lambda: None


def content(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def found(**optimizers: torch.optim.Optimizer) -> dict[str, Attribute]:
    return attributes.find(optimizers, lambda _: False)


def own() -> Own:
    return Own([torch.nn.Parameter(torch.ones(3))])


def test_plain_data_of_an_optimizer_is_found_but_neither_torchs_nor_parameters() -> None:
    one = own()
    assert set(found(a=one)) == {f"optimizer a.{x}" for x in ("t", "moments", "parameters")}
    torch_s = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(torch_s, lambda _: 1.0)
    assert not found(a=torch_s)
    torch_s._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    assert not found(a=torch_s)
    torch_s.n_steps = 0  # type: ignore[attr-defined]
    assert set(found(a=torch_s)) == {"optimizer a.n_steps"}
    one.inner = own()  # type: ignore[attr-defined]
    assert "optimizer a.inner.moments" in found(a=one)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "t", 1),
        lambda one: one.moments[0].add_(1),
        lambda one: one.moments.append(torch.ones(1)),
        lambda one: one.trace["norms"].append(1.0),
        lambda one: one.trace.update(best=0),
    ],
)
def test_a_change_is_seen_at_the_next_look(change: Callable[[Any], Any]) -> None:
    one = own()
    one.trace = {"norms": [0.5], "best": None}  # type: ignore[attr-defined]
    looked = found(a=one)
    for deep in (True, False, False):
        assert not any(each.changed(content, deep) for each in looked.values())
    change(one)
    assert sum(each.changed(content, False) for each in looked.values()) == 1


def test_loading_keeps_the_objects_that_others_refer_to() -> None:
    one, other = own(), own()
    kept, moment = one.moments, one.moments[0]
    other.moments[0].add_(7)
    other.moments.append(torch.ones(2))
    other.t = 5
    theirs = found(a=other)
    for path, mine in found(a=one).items():
        mine.load(theirs[path].save())
    assert one.t == 5
    assert one.moments is kept
    assert one.moments[0] is moment
    assert [x.tolist() for x in kept] == [[7, 7, 7], [1, 1]]


def test_parameters_are_told_by_their_places() -> None:
    one, other = own(), own()
    for each in (one, other):
        (parameter,) = each.param_groups[0]["params"]
        each.by = {parameter: torch.zeros(2)}  # type: ignore[attr-defined]
        each.pairs = [(parameter, 1.5)]  # type: ignore[attr-defined]
    (theirs,) = other.by.values()  # type: ignore[attr-defined]
    theirs.add_(3)
    for name in ("by", "pairs"):
        path = f"optimizer a.{name}"
        data, tensors = codec.dumps(found(a=other)[path].save())
        found(a=one)[path].load(codec.loads(data, tensors))
    (mine,) = one.param_groups[0]["params"]
    assert list(one.by) == [mine]  # type: ignore[attr-defined]
    assert one.by[mine].tolist() == [3, 3]  # type: ignore[attr-defined]
    assert one.pairs[0][0] is mine  # type: ignore[attr-defined]


def test_a_dict_of_another_class_is_filled_in_place() -> None:
    one = own()
    one.counts = collections.defaultdict(int, a=1)  # type: ignore[attr-defined]
    found(a=one)["optimizer a.counts"].load({"a": 5})
    one.counts["new"] += 1  # type: ignore[attr-defined]
    assert one.counts == {"a": 5, "new": 1}  # type: ignore[attr-defined]


def test_what_appears_later_is_registered_at_once_and_expected_by_a_newcomer() -> None:
    one, names = own(), []
    unasked = Unasked(
        lambda: roots.Roots({}, {}),
        lambda _: False,
        content,
        lambda name, *_: names.append(name),
        names.remove,
        {"a": one},
    )
    unasked.look("step", 5)
    unasked.look_at_attributes()
    assert names == []
    one.slow = [torch.ones(2)]  # type: ignore[attr-defined]
    unasked.look_at_attributes()
    assert names == ["script/optimizer a.slow"]
    one.t += 1
    unasked.look_at_attributes()
    assert names[1:] == ["script/optimizer a.t"]
    newcomer, registered = own(), {}
    Unasked(
        lambda: roots.Roots({}, {}),
        lambda _: False,
        content,
        lambda name, save, load, _: registered.update({name: load}),
        registered.pop,
        {"a": newcomer},
    ).expect(set(names))
    registered["script/optimizer a.slow"]([torch.ones(2)])
    assert newcomer.slow[0].tolist() == [1, 1]  # type: ignore[attr-defined]


class Average:
    def __init__(self) -> None:
        self.updates, self.shadow = 0, {"w": torch.zeros(2)}


def carried(thing: Any, change: Callable[[], Any], known: bool) -> bytes:
    variables = Variables(lambda one: known and one is thing)

    def step() -> Any:
        return thing

    variables.watch(step)
    for _ in range(2):
        variables.begin([], step)
        change()
        variables.capture()
        variables.end()
    variables.begin([], step)
    data = variables.capture()
    variables.end()
    return data


def test_numbers_of_a_registered_object_are_carried_and_its_tensors_are_not() -> None:
    average = Average()

    def update() -> None:
        average.updates += 1
        average.shadow["w"].add_(1)

    data = carried(average, update, known=True)
    assert b"updates" in data
    assert b"shadow" not in data
    assert RegisteredNames.kind.encode() in data
    assert b"shadow" in carried(average, update, known=False)


class Meter:
    def __init__(self) -> None:
        self.values: collections.deque[float] = collections.deque([1.0])
        self.history: list[float] = []
        self.bank = numpy.zeros(2)
        self.seen = torch.zeros(1)
        self.sizes = [4, 4]

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self.values), "_seen": self.seen}


def test_what_a_state_dict_leaves_out_is_named_if_it_changes() -> None:
    meter = Meter()
    variables = Variables(lambda one: one is meter)

    def step() -> Any:
        return meter

    variables.watch(step)
    told: list[str] = []
    for _ in range(6):
        variables.begin([], step)
        meter.values.append(2.0)
        meter.history.append(2.0)
        meter.bank += 1
        meter.seen += 1
        variables.capture()
        variables.end()
        told += variables.unknown()
    assert len(told) == 2, told
    for name, text in zip(("history", "bank"), told, strict=True):
        assert f"meter.{name} changes" in text
        assert "leaves it out" in text
        assert "hint:" in text


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], types.ModuleType]:
    """Installs a package and imports it."""
    folder = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(frames, "_claimed", [])
    made: list[str] = []

    def install(name: str, code: str) -> types.ModuleType:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
        made.append(name)
        return __import__(name)

    yield install  # type: ignore[misc]
    for name in made:
        del sys.modules[name]
    frames._origins.clear()
    graph.module_origin.cache_clear()
    graph._helping.clear()
    graph._entering.clear()


PACKAGE = """
import collections, threading, torch

class Plain: pass
class Thread(threading.Thread): pass
class Mapping(dict): pass
class Net(torch.nn.Module): pass
class Batch(collections.UserDict): pass

def call(function):
    return function()
"""


def test_helpers_are_python_objects_of_other_packages(package: Any) -> None:
    module = package("some_helpers", PACKAGE)
    helping = {name: graph.helper(vars(module)[name]) for name in ("Plain", "Batch")}
    assert helping == {"Plain": True, "Batch": True}
    assert not any(graph.helper(vars(module)[name]) for name in ("Thread", "Mapping", "Net"))
    assert not graph.helper(package("wandb", PACKAGE).Plain)
    assert not graph.helper(Average)
    assert not graph.helper(torch.Generator)


def test_attributes_of_helpers_are_carried_and_batches_are_not(package: Any) -> None:
    module = package("more_helpers", PACKAGE)
    thing = module.Plain()
    thing.count = 0

    def change() -> None:
        thing.count += 1

    assert b"count" in carried(thing, change, known=False)
    graph_ = Discovery(lambda _: False, lambda _: False)
    graph_.leave_alone(module.Batch)
    batch = module.Batch(x=1)
    root = graph_.root("function", FunctionNames, lambda: (batch, thing))
    root.scan(graph_)
    assert [child.target for child in root.children.values()] == [thing]


def test_a_helper_that_runs_a_thread_is_left_alone(package: Any) -> None:
    module = package("threaded_helpers", PACKAGE)
    thing = module.Plain()
    thing.count, thing.lock = 0, threading.Lock()
    assert b"count" not in carried(thing, lambda: setattr(thing, "count", 1), known=False)


def test_objects_of_helpers_that_come_and_go_are_forgotten(package: Any) -> None:
    module = package("fleeting_helpers", PACKAGE)
    variables = Variables()
    box: dict[str, Any] = {}

    def step() -> Any:
        return box

    variables.watch(step)
    counts = []
    for i in range(20):
        box["out"] = module.Plain()
        box["out"].loss = torch.ones(2) * i
        variables.begin([], step)
        variables.capture()
        variables.end()
        counts.append(variables._graph.helpers)
    assert counts[-1] <= counts[2]


def test_too_many_objects_of_helpers_are_named(package: Any) -> None:
    module = package("many_helpers", PACKAGE)
    thing = module.Plain()
    thing.parts = [module.Plain() for _ in range(HELPERS_MAX)]
    variables = Variables()

    def step() -> Any:
        return thing

    variables.watch(step)
    variables.begin([], step)
    variables.end()
    texts = [text for text in variables.warnings() if "more objects than are looked at" in text]
    assert len(texts) == 1
    assert "parts" in texts[0]
    assert not variables.warnings()


def test_a_package_that_uses_keepstep_is_the_users(package: Any) -> None:
    module = package("company", PACKAGE)
    path = module.__file__
    assert graph.origin(module) == "installed"
    assert frames.origin(path) == "library"
    assert graph.helper(module.Plain)
    assert module.call(roots.claim_caller) is True
    assert module.call(roots.claim_caller) is False
    assert graph.origin(module) == "user"
    assert frames.origin(path) == "script"
    assert not graph.helper(module.Plain)
    assert "company" in graph.user_modules()
    assert graph.origin(package("company_other", PACKAGE)) == "installed"


def test_trackers_that_call_are_not_the_users(package: Any) -> None:
    module = package("mlflow", PACKAGE)
    module.call(roots.claim_caller)
    assert graph.origin(module) == "installed"
