"""The script's variables in real frames: carried to a newcomer, put back before a retry.

Every script here runs once undisturbed. Then, for each of its steps, a newcomer runs it from the
top; its first step returns at once with the variables of that step set, as the end of a walk does.
From there on it must log exactly what the undisturbed run logged.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import gc
import io
import itertools
import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from keepstep.errors import UsageError
from keepstep.worker.script import frames, sharing, values
from keepstep.worker.script.variables import Variables
from tests.support.variables import Rank, check, nothing, run

# ------------------------------------------------------------------------------------- newcomer


def test_counters_and_histories_in_nested_functions() -> None:
    def train_epoch(ks: Rank, epoch: int, history: list[float]) -> float:
        total = 0.0
        for i in range(3):
            ks.step(nothing)
            total += (i + 1) * (epoch + 1)
            history.append(total)
            ks.log.append((epoch, i, total, list(history)))
        return total

    def script(ks: Rank) -> None:
        history: list[float] = []
        for epoch in range(3):
            train_epoch(ks, epoch, history)

    check(script)


def test_enumerate_zip_and_generators_around_the_batches() -> None:
    def progress(items: Any) -> Iterator[Any]:
        shown = 0
        for item in items:
            yield item
            shown = shown + 1
            assert shown

    def script(ks: Rank) -> None:
        for i, (batch, name) in enumerate(progress(zip(range(10, 15), "abcde", strict=True)), 1):
            ks.step(nothing)
            ks.log.append((i, batch, name))

    check(script)


def test_while_loops_and_a_manual_counter() -> None:
    def script(ks: Rank) -> None:
        it, accumulated, numbers = 0, [0], itertools.count(100)
        while it < 6:
            if it % 2 == 0:
                accumulated = []
            ks.step(nothing)
            accumulated.append(next(numbers))
            it += 1
            ks.log.append((it, list(accumulated)))

    check(script)


def test_a_step_with_nonlocal_and_a_function_attribute() -> None:
    def script(ks: Rank) -> None:
        calls = 0

        def train_step() -> int:
            nonlocal calls
            calls += 1
            train_step.seen += 2  # type: ignore[attr-defined]
            return calls

        train_step.seen = 0  # type: ignore[attr-defined]
        for _ in range(4):
            ks.step(train_step)
            ks.log.append((calls, train_step.seen))  # type: ignore[attr-defined]

    check(script)


counter = 0
best: dict[str, float] = {}


def test_globals_of_a_module() -> None:
    def script(ks: Rank) -> None:
        global counter
        counter = 0
        best.clear()

        def train_step() -> None:
            global counter
            counter += 1

        for i in range(4):
            ks.step(train_step)
            best["loss"] = 1.0 / (i + 1)
            ks.log.append((counter, dict(best)))

    check(script)


class Meter:
    total = 0
    made: list[str] = []

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = 0.0
        self.window: collections.deque[float] = collections.deque(maxlen=2)

    def update(self, value: float) -> None:
        Meter.total += 1
        self.sum += value
        self.window.append(value)


@dataclasses.dataclass(slots=True)
class State:
    step: int = 0
    best: float | None = None


def test_attributes_of_objects_and_classes() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.global_step = 0
            self.meters = {"loss": Meter("loss")}
            self.state = State()

        def fit(self, ks: Rank) -> None:
            for value in [0.5, 0.25, 4.0, 1.0]:
                ks.step(self.train_step, value)
                self.state.step += 1
                self.state.best = min(value, self.state.best or 9.0)
                meter = self.meters["loss"]
                meter.update(value)
                seen = (meter.sum, list(meter.window), Meter.total)
                ks.log.append((self.global_step, self.state.step, self.state.best, *seen))

        def train_step(self, value: float) -> None:
            self.global_step += 1

    def script(ks: Rank) -> None:
        Meter.total = 0
        Trainer().fit(ks)

    check(script)


def test_one_list_under_two_names_stays_one() -> None:
    def script(ks: Rank) -> None:
        losses: list[int] = []
        meter = types.SimpleNamespace(history=losses)
        kept: dict[str, list[int]] = {}
        for i in range(4):
            ks.step(nothing)
            losses.append(i)
            if i == 1:
                kept["old"], losses = losses, []
            seen = losses is meter.history, kept.get("old") is meter.history
            ks.log.append((i, list(losses), list(meter.history), seen))

    check(script)


def test_a_list_that_was_replaced_does_not_change_the_old_one() -> None:
    def script(ks: Rank) -> None:
        current: list[int] = [0]
        first = current
        for i in range(4):
            ks.step(nothing)
            current = [*current, i]
            ks.log.append((list(first), list(current)))

    check(script)


def test_locals_that_only_the_dead_rank_had() -> None:
    def script(ks: Rank) -> None:
        for i in range(5):
            if i == 1:
                stale = {"seen": [i], "meter": Meter("late")}
            ks.step(nothing)
            if i >= 1:
                stale["seen"].append(i)
                stale["meter"].update(float(i))
                ks.log.append((i, list(stale["seen"]), stale["meter"].sum))
            else:
                ks.log.append((i,))

    check(script)


def test_a_loop_variable_of_an_earlier_loop() -> None:
    def train(ids: torch.Tensor) -> None:
        pass

    def script(ks: Rank) -> None:
        for epoch in range(0 if ks.tree is None else 1, 2):
            for number in range(2):
                ks.step(train, torch.tensor([epoch, number]))
                if epoch:
                    ks.log.append((number, ids.tolist()))  # noqa: F821
            if epoch == 0:
                for number in range(2):
                    ids = torch.tensor([7, epoch, number])
                    ks.step(train, ids)

    undisturbed = run(script)
    assert undisturbed.log == [(0, [7, 0, 1]), (1, [7, 0, 1])]
    for number in (0, 1):
        assert run(script, undisturbed.trees[4 + number]).log == undisturbed.log[number:]


def test_an_iterator_that_has_a_name() -> None:
    def script(ks: Rank) -> None:
        for epoch in range(3):
            pairs = zip(range(10), range(5, 9))
            for i, (a, b) in enumerate(pairs):
                ks.step(nothing)
                ks.log.append((epoch, i, a, b))

    check(script)


def test_a_loop_over_something_that_has_no_name() -> None:
    def script(ks: Rank) -> None:
        for epoch in range(2):
            for index in torch.randperm(6).split(2):
                ks.step(nothing)
                ks.log.append((epoch, index.tolist()))

    torch.manual_seed(1)
    undisturbed = run(script)
    for number in range(3):  # a walk that draws otherwise
        torch.manual_seed(2)
        newcomer = run(script, undisturbed.trees[number])
        assert newcomer.log[1 : 3 - number] == undisturbed.log[number + 1 : 3]


def test_a_script_that_resumes_by_itself() -> None:
    start = 0

    def script(ks: Rank) -> None:
        for epoch in range(start, 4):
            ks.step(nothing)
            ks.log.append(epoch)

    undisturbed = run(script)
    start = 3
    for number, tree in enumerate(undisturbed.trees):
        assert run(script, tree).log[1:] == undisturbed.log[number + 1 :]


def one() -> int:
    return 1


def test_a_sum_that_waits_for_the_step() -> None:
    """It lies on the interpreter's stack while the step runs."""

    def script(ks: Rank) -> None:
        total = 0
        for epoch in range(2):
            for i in range(3):
                total += 10 * epoch + (ks.step(one) or 1) + i
                ks.log.append(total)

    check(script)


def test_a_list_that_waits_for_the_step() -> None:
    def script(ks: Rank) -> None:
        for epoch in range(2):
            each = []
            for i in range(3):
                each.append(epoch + i + (ks.step(one) or 1))
                ks.log.append(list(each))

    check(script)


def test_comprehensions_of_steps() -> None:
    def listed(ks: Rank) -> None:
        for _ in range(2):
            found = [(ks.step(one) or 1, i, ks.log.append(i)) for i in range(3)]
            ks.log[-1] = (ks.log[-1], found)

    def keyed(ks: Rank) -> None:
        for _ in range(2):
            found = {i: (ks.step(one) or 1, ks.log.append(i)) for i in range(3)}
            ks.log[-1] = (ks.log[-1], found)

    check(listed)
    check(keyed)


def test_a_tensor_that_is_added_to() -> None:
    def script(ks: Rank) -> None:
        for epoch in range(2):
            total = torch.zeros(1)
            for i in range(3):
                total.add_((ks.step(one) or 1) * (i + 1))
                ks.log.append((epoch, i, total.item()))

    check(script)


def test_steps_inside_what_collects_are_refused_by_name() -> None:
    def summed(ks: Rank) -> None:
        sum(ks.step(one) for _ in range(3))

    def mapped(ks: Rank) -> None:
        list(map(ks.step, [one, one]))

    def extended(ks: Rank) -> None:
        [].extend(ks.step(one) for _ in range(3))

    for script, name in ((summed, "sum"), (mapped, "list"), (extended, ".extend")):
        with pytest.raises(UsageError, match=f"one runs inside {name} in .*{script.__name__}"):
            run(script)


def test_methods_of_the_script_may_have_such_names() -> None:
    class Trainer:
        def extend(self, ks: Rank) -> None:
            ks.step(one)

    def script(ks: Rank) -> None:
        trainer = Trainer()
        for _ in range(3):
            trainer.extend(ks)
            ks.log.append(None)

    run(script)


class Phase(enum.Enum):
    WARM = 1
    FULL = 2


Pair = collections.namedtuple("Pair", "left right")


def test_every_kind_of_plain_data() -> None:
    def script(ks: Rank) -> None:
        things: dict[str, Any] = {}
        phase, pair = Phase.WARM, Pair(0, [])
        for i in range(3):
            ks.step(nothing)
            phase = Phase.FULL if i else Phase.WARM
            pair = Pair(i, [*pair.right, i])
            things.update(
                none=None,
                big=1 << (70 + i),
                negative_zero=-0.0 * (i + 1),
                complex=complex(i, 1),
                text="é" * i,
                raw=b"\xff" * i,
                nested={(i, "x"): {i}, "deep": [[i], (i, [i])]},
                counter=collections.Counter("ab" * i),
                grouped=collections.defaultdict(list, {i: [i]}),
                ordered=collections.OrderedDict(a=i),
                frozen=frozenset({i}),
                scalar=numpy.float32(i) / 3,
                buffer=bytearray([i]),
                array=array.array("d", [0.5] * i),
            )
            ks.log.append((i, phase, pair, repr(things)))

    check(script)


def test_small_tensors_and_arrays() -> None:
    def script(ks: Rank) -> None:
        running, table = torch.zeros(3), numpy.zeros(2)
        counts, seen = array.array("q", [0, 0]), array.array("H")
        view = running  # another name for the same tensor
        for i in range(4):
            ks.step(nothing)
            running.mul_(0.9).add_(i)
            table[i % 2] += i
            counts[i % 2] += i
            seen.append(i)
            mean = running.mean()
            lists = running.tolist(), table.tolist(), counts.tolist(), seen.tolist()
            ks.log.append((*lists, mean.item(), view is running))

    check(script)


def test_plain_attributes_of_a_network() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
            self.calls = 0

    def script(ks: Rank) -> None:
        net = Net()

        def train_step() -> None:
            net.calls += 1
            net.inner[1].p = net.calls / 10

        for _ in range(3):
            ks.step(train_step)
            ks.log.append((net.calls, net.inner[1].p))

    rank = check(script)
    assert all(b"weight" not in tree for tree in rank.trees)


def test_what_belongs_to_the_slot_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"local_rank": 0, "host": "alpha"}

    def inner(ks: Rank, i: int) -> None:
        late_rank = where["local_rank"]
        name = f"cuda:{late_rank} on {where['host']}"
        offset = i + 1
        ks.step(nothing)
        ks.log.append((late_rank, name, offset))

    def script(ks: Rank) -> None:
        local_rank = where["local_rank"]
        ks.step(nothing)
        ks.log.append(local_rank)
        for i in range(3):
            inner(ks, i)

    monkeypatch.setattr(values, "slot_now", ["0", "alpha", "1"])
    dead = run(script)
    where.update(local_rank=3, host="beta")
    monkeypatch.setattr(values, "slot_now", ["3", "beta", "2"])
    newcomer = run(script, dead.trees[0])
    assert newcomer.log[0] == 3
    assert newcomer.log[1][0] == 3


def test_a_newcomer_can_be_replaced_in_turn() -> None:
    def script(ks: Rank) -> None:
        total, best_at, seen = 0, None, []
        for i in range(6):
            ks.step(nothing)
            total += i
            if i == 1:
                best_at = i
            seen.append(i)
            ks.log.append((total, best_at, list(seen)))

    undisturbed = run(script)
    first = run(script, undisturbed.trees[2])
    second = run(script, first.trees[1])
    assert second.log == undisturbed.log[4:]


def test_other_control_flow_is_refused_by_name() -> None:
    shape = {"generator": True}

    def numbers() -> Iterator[int]:
        yield from range(5)

    def script(ks: Rank) -> None:
        for i in numbers() if shape["generator"] else iter([1, 2, 3]):
            ks.step(nothing)
            ks.log.append(i)

    dead = run(script)
    shape["generator"] = False
    with pytest.raises(UsageError, match="script"):
        run(script, dead.trees[1])


# ---------------------------------------------------------------------------------------- retry


def test_a_retry_finds_everything_as_it_was() -> None:
    def script(ks: Rank) -> None:
        count, losses = 0, [1.0]
        alias, meter, table = losses, Meter("m"), {"a": [1]}
        tensor, numbers = torch.zeros(2), itertools.count()
        grown = array.array("i")

        def train_step() -> None:
            nonlocal count, losses
            count += 1
            grown.append(count)
            losses.append(float(count))
            losses = list(losses)
            meter.update(1.0)
            meter.extra = count  # type: ignore[attr-defined]
            table["a"].append(count)
            table[f"new {count}"] = []
            tensor.add_(1)
            next(numbers)

        for i in range(3):
            ks.retries = i
            ks.step(train_step)
            seen = (list(losses), list(alias), meter.sum, list(meter.window), repr(table))
            ks.log.append((count, *seen, tensor.tolist(), grown.tolist(), repr(numbers)))

    check_retries(script)


def check_retries(script: Callable[[Rank], None]) -> None:
    disturbed = run(script)
    calm = Rank(script.__code__)
    calm.calm = True
    script(calm)
    assert disturbed.log == calm.log


def test_a_generator_that_the_step_pulls_is_put_back() -> None:
    def numbers(items: list[int]) -> Iterator[int]:
        drawn = 0
        for item in items:
            drawn = drawn + 1
            yield item * drawn

    def script(ks: Rank) -> None:
        source = numbers([3, 4, 5, 6])

        def train_step() -> int:
            return next(source)

        for i in range(3):
            ks.retries = 1 if i else 0  # before the first pull there is no yield to go back to
            ks.log.append(ks.step(train_step))

    assert run(script).log == [3, 8, 15]


def test_a_generator_that_cannot_go_back_is_refused() -> None:
    def phases() -> Iterator[str]:
        yield "warm"
        yield "full"
        yield "cool"

    def script(ks: Rank) -> None:
        phase = phases()
        next(phase)
        ks.retries = 1
        ks.step(lambda: next(phase))

    with pytest.raises(UsageError, match=r"generator .*phase") as refused:
        run(script)
    assert "hint:" in str(refused.value)


def test_undo_after_an_exception() -> None:
    def script(ks: Rank) -> None:
        seen: list[int] = []
        count = 0

        def train_step() -> None:
            nonlocal count
            count += 1
            seen.append(count)
            raise ConnectionError

        ks.variables.begin(ks.frames(1), train_step, ())
        with pytest.raises(ConnectionError):
            train_step()
        ks.variables.undo()
        ks.log.append((count, seen))

    assert run(script).log == [(0, [])]


def test_what_changes_behind_the_fence_is_told_late() -> None:
    def script(ks: Rank) -> None:
        state = State()

        def train_step() -> None:
            state.step += 1
            if state.step == 2:
                ks.trees.append(ks.variables.capture())
                state.best = 0.5  # after the optimizer's update

        for _ in range(2):
            ks.variables.begin(frames.script_frames(ks.root), train_step, ())
            train_step()
            if state.step == 1:
                ks.trees.append(ks.variables.capture())
            ks.lates.append(ks.variables.late())
            ks.variables.end()

    rank = run(script)
    assert rank.lates[0] is None
    assert rank.lates[1] is not None
    assert rank.lates[1] != rank.trees[1]


# --------------------------------------------------------------------------- bounds and lifetime


def test_nothing_travels_before_anything_has_changed() -> None:
    def script(ks: Rank) -> None:
        width, names = 3, ["a"]
        ks.step(nothing)
        ks.log.append((width, names))

    assert run(script).trees[0] == b""


def test_a_large_list_is_named_once() -> None:
    def script(ks: Rank) -> None:
        replay = list(range(4095))
        for i in range(4):
            ks.step(nothing)
            replay.append(i)
            ks.log.extend(ks.variables.warnings())

    log = run(script).log
    assert len(log) == 1
    assert "replay" in log[0]
    assert "hint: ks.register" in log[0]


def test_an_iterator_that_the_script_has_left_dies_at_once() -> None:
    """A ks.batches loop is over when its iterator is gone."""

    class Source:
        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            return 1

    def script(ks: Rank) -> None:
        for _ in range(3):
            source = Source()
            ref = weakref.ref(source)
            for i, _ in enumerate(source):
                del source
                ks.step(nothing)
                if i == 0:
                    break
            ks.log.append(ref())

    gc.disable()
    try:
        assert run(script).log == [None, None, None]
    finally:
        gc.enable()


def test_an_old_output_is_freed_between_steps() -> None:
    class Output:
        def __init__(self) -> None:
            self.logits = torch.zeros(100_000)

    def script(ks: Rank) -> None:
        output: Any = None
        for _ in range(4):
            ks.step(nothing)
            output = Output()
            ref = weakref.ref(output)
            ks.step(nothing)
            output = None
            ks.log.append(ref())

    assert run(script).log[1:] == [None, None, None]


def test_losses_that_are_tensors_with_and_without_their_graph() -> None:
    """Also on the newcomer of a newcomer, which has them without."""

    def script(ks: Rank) -> None:
        weight = torch.ones(3, requires_grad=True)
        history: list[torch.Tensor] = []
        window: deque[torch.Tensor] = deque(maxlen=2)
        total: Any = 0.0
        for turn in range(5):
            loss = ks.step(lambda turn=turn: (weight * turn).sum())
            if loss is None:
                loss = torch.tensor(3.0 * turn)
            history.append(loss)
            window.append(loss.detach().bfloat16())
            total = total + loss
            ks.log.append([x.item() for x in (*history, *window, total)])

    undisturbed = check(script)
    for number, tree in enumerate(undisturbed.trees[:-1], 1):
        newcomer = run(script, tree)
        for second, other in enumerate(newcomer.trees):
            assert run(script, other).log == undisturbed.log[number + second :]


def test_equal_tensors_are_not_taken_for_the_same() -> None:
    def script(ks: Rank) -> None:
        kept = [torch.zeros(1), torch.zeros(1)]
        for turn in range(4):
            ks.step(nothing)
            kept[:] = [torch.zeros(1) for _ in kept]
            kept[turn % 2] += turn
            ks.log.append([x.item() for x in kept])

    check(script)


def test_sparse_nested_and_quantized_tensors_are_left_alone() -> None:
    def script(ks: Rank) -> None:
        adjacency = torch.eye(4).to_sparse()
        kept = [adjacency, torch.eye(4).to_sparse_csr()]
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        whole = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        for turn in range(3):
            ks.step(lambda: adjacency.to_dense().sum())
            kept.append(adjacency)
            ks.log.append((turn, ragged.size(0), whole.numel()))

    check(script)


# --------------------------------------------------------------------------------- shared memory


def test_rows_of_a_bank_are_part_of_it() -> None:
    def script(ks: Rank) -> None:
        bank, large = torch.zeros(4, 3), torch.zeros(300, 100)
        for i in range(6):
            row, wide = bank[i % 4], large[i]
            ks.step(nothing)
            row.add_(i + 1)
            wide.add_(i + 1)
            ks.log.append((bank.tolist(), row.tolist(), large.sum().item()))

    check(script)


def test_halves_of_a_table_that_is_bound_anew() -> None:
    def script(ks: Rank) -> None:
        low = high = table = torch.zeros(2)
        for i in range(6):
            if i % 3 == 0:
                table = torch.full((6,), float(i))
                low, high = table[:4], table[2:]
            ks.step(nothing)
            low += 1
            high *= 2
            ks.log.append((table.tolist(), low.tolist(), high.tolist()))

    check(script)


def test_views_whose_base_has_no_name() -> None:
    def script(ks: Rank) -> None:
        low = high = torch.zeros(2)
        for i in range(6):
            if i % 3 == 0:
                both = torch.full((7,), float(i))
                low, high = both[1:5], both[3:]
                del both
            ks.step(nothing)
            low += 1
            high *= 2
            ks.log.append((low.tolist(), high.tolist()))

    check(script)


def test_an_array_over_the_memory_of_a_tensor() -> None:
    def script(ks: Rank) -> None:
        counts = torch.zeros(6)
        for i in range(6):
            if i == 3:
                counts = torch.ones(6)
            column, matrix = counts.numpy()[::2], counts.view(2, 3).t()
            ks.step(nothing)
            column += i
            matrix[1] -= 1
            ks.log.append((counts.tolist(), column.tolist(), matrix.tolist()))

    check(script)


def test_views_of_numpy_arrays_and_of_another_type() -> None:
    def script(ks: Rank) -> None:
        table = numpy.zeros((4, 2), dtype=numpy.float32)
        bits = torch.zeros(4)
        for i in range(5):
            row, words = table[i % 4], bits.view(torch.int32)
            ks.step(nothing)
            row += i
            words += i
            ks.log.append((table.tolist(), bits.tolist(), words.tolist()))

    check(script)


def test_tensors_that_share_nothing_stay_apart() -> None:
    def script(ks: Rank) -> None:
        first = torch.zeros(4)
        second = first[:2]
        for _ in range(5):
            ks.step(nothing)
            first = first + 1  # from here on no view leads to it
            second.add_(1)
            ks.log.append((first.tolist(), second.tolist()))

    check(script)


def test_memory_that_a_tensor_has_left_is_not_shared() -> None:
    def script(ks: Rank) -> None:
        box, more = [torch.zeros(300, 100)], [torch.zeros(10, 100)]
        for i in range(8):
            if i == 3:
                box[0].data = torch.full((300, 100), 5.0)
                box[0].mul_(1)
                other = torch.full((300, 100), 7.0)
                more[0] = other[:10]
                del other
            row = box[0][i]
            ks.step(nothing)
            more[0].add_(1)
            row.add_(1)
            ks.log.append((box[0].sum().item(), more[0].sum().item()))

    check(script)


def test_a_small_tensor_whose_data_is_another_one() -> None:
    def script(ks: Rank) -> None:
        table = torch.zeros(4)
        for i in range(6):
            if i == 2:
                table.data = torch.full((4,), 3.0)
            ks.step(nothing)
            table[i % 4] += 1
            ks.log.append(table.tolist())

    check(script)


def test_conjugate_views_leave_the_tensor_as_it_is() -> None:
    def script(ks: Rank) -> None:
        z = torch.arange(20000.0).to(torch.complex64) * (1 + 1j)
        for _ in range(4):
            w = z.conj()

            def step(w: torch.Tensor = w) -> torch.Tensor:
                return w

            ks.step(step)
            ks.log.append((z[1].item(), w[1].item()))

    check(script)


def test_parts_of_data_that_nobody_changes_cost_nothing(tmp_path: Any) -> None:
    numpy.arange(4000, dtype=numpy.int32).tofile(tmp_path / "tokens")

    def script(ks: Rank) -> None:
        tokens = torch.from_numpy(numpy.memmap(tmp_path / "tokens", dtype=numpy.int32, mode="r"))
        data = torch.arange(400000.0).view(4000, 100)
        with torch.inference_mode():
            features = torch.ones(4000, 100) * 2
        for i in range(5):
            x, y, z = data[4 * i : 4 * i + 4], tokens[i : i + 4], features[i]
            ks.step(nothing)
            ks.log.append((x.sum().item(), y.tolist(), z.sum().item()))

    undisturbed = check(script)
    newcomer = run(script, undisturbed.trees[1])
    assert not newcomer.variables.heavy()
    assert max(map(len, newcomer.trees)) < 16 << 10


def test_arrays_that_torch_does_not_know() -> None:
    def script(ks: Rank) -> None:
        numbers = numpy.arange(8.0)
        swapped = numpy.arange(6, dtype=">i4")
        precise = numpy.zeros(6, dtype=numpy.longdouble)
        records = numpy.zeros(4, dtype=[("x", "f4"), ("y", "i2")])
        back = numbers[::-1]
        for i in range(5):
            turned, rest, row = back[i : i + 3], swapped[i:], precise[i : i + 2]
            xs, ys = records["x"], records["y"]
            ks.step(nothing)
            turned += 1
            rest += 1
            row += 1
            xs += i
            ys += 1
            ks.log.append(
                [x.tolist() for x in (numbers, turned, swapped, rest, precise, row, records)]
            )

    check(script)


def test_a_tensor_over_a_row_of_an_array() -> None:
    def script(ks: Rank) -> None:
        table = numpy.zeros((6, 4), dtype=numpy.float32)
        for i in range(6):
            row = torch.from_numpy(table[i])
            ks.step(nothing)
            row += i + 1
            ks.log.append((table.tolist(), row.tolist()))

    check(script)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_that_numpy_does_not_know() -> None:
    def script(ks: Rank) -> None:
        eight = torch.zeros(4).to(torch.float8_e4m3fn)
        half, brain = torch.zeros(4, dtype=torch.complex32), torch.zeros(4, dtype=torch.bfloat16)
        turned = torch.tensor([1 + 2j])
        for i in range(5):
            turned = (turned * (1 + i)).conj()
            imaginary = turned.imag
            ks.step(nothing)
            eight = (eight.float() + i).to(torch.float8_e4m3fn)
            half.real.add_(i)
            brain += i
            logged = (eight.float(), half.real, brain.float(), turned.resolve_conj(), imaginary)
            ks.log.append([x.tolist() for x in logged])

    check(script)


def test_tensors_without_memory_of_their_own_have_no_place() -> None:
    pair = TwoTensor(torch.ones(2), torch.ones(2))
    for tensor in (pair, torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.empty(0)):
        assert sharing.place(tensor) is None
    assert sharing.place(numpy.zeros(0)) is None


# ------------------------------------------------------------------ functions, hooks and modules


def first(x: float) -> float:
    return x + 1


def second(x: float) -> float:
    return 10 * x


class Methods:
    def one(self) -> int:
        return 1

    def two(self) -> int:
        return 2


@pytest.mark.parametrize(
    "pair",
    [
        (first, second),
        (math.sin, math.cos),
        (torch.relu, torch.tanh),
        (numpy.exp, numpy.log1p),
        (torch.nn.functional.relu, torch.nn.functional.gelu),
    ],
)
def test_a_name_that_is_bound_to_another_function(pair: Any) -> None:
    x = 2.0 if pair[0] in (first, math.sin) else torch.tensor([2.0])
    x = numpy.float64(1) if pair[0] is numpy.exp else x

    def script(ks: Rank) -> None:
        function, table, kept = pair[0], {"loss": pair[0]}, [pair[0]]
        for i in range(5):
            if i == 2:
                function = table["loss"] = pair[1]
                kept.append(pair[1])
            ks.step(nothing)
            ks.log.append([float(f(x)) for f in (function, table["loss"], *kept)])

    check(script)


def test_ranges_and_slices_that_change() -> None:
    def script(ks: Rank) -> None:
        part, some = slice(0, 1), range(3)
        for i in range(5):
            if i == 2:
                part, some = slice(0, 3), range(1, 9, 2)
            ks.step(nothing)
            ks.log.append(([1, 2, 3, 4][part], list(some)))

    check(script)


def test_a_dict_whose_keys_are_parameters() -> None:
    def script(ks: Rank) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        means = {parameter: torch.zeros(2)}
        for _ in range(5):
            means[parameter].add_(1)
            ks.step(nothing)
            ks.log.append(means[parameter].tolist())

    check(script)


def lambdas(ks: Rank) -> None:
    function = lambda x: x + 1  # noqa: E731
    for i in range(5):
        if i == 2:
            function = lambda x: 10 * x  # noqa: E731
        ks.step(nothing)
        ks.log.append(function(2))


def methods(ks: Rank) -> None:
    things = Methods()
    function = things.one
    for i in range(5):
        if i == 2:
            function = things.two
        ks.step(nothing)
        ks.log.append(function())


def hooks(ks: Rank) -> None:
    net = torch.nn.Identity()
    for i in range(5):
        if i == 2:
            net.register_forward_hook(lambda module, inputs, output: 5 * output)
        ks.step(nothing)
        ks.log.append(float(net(torch.ones(1))))


def hooks_removed(ks: Rank) -> None:
    net = torch.nn.Identity()
    handle = net.register_forward_hook(lambda module, inputs, output: 5 * output)
    for i in range(5):
        if i == 2:
            handle.remove()
        ks.step(nothing)
        ks.log.append(float(net(torch.ones(1))))


def modules_inside(ks: Rank) -> None:
    net = torch.nn.Sequential(torch.nn.ReLU())
    for i in range(5):
        if i == 2:
            net[0] = torch.nn.Tanh()
        ks.step(nothing)
        ks.log.append(float(net(torch.ones(1))))


def forwards(ks: Rank) -> None:
    net = torch.nn.Identity()
    for i in range(5):
        if i == 2:
            net.forward = lambda x: 5 * x  # type: ignore[method-assign]
        ks.step(nothing)
        ks.log.append(float(net(torch.ones(1))))


@pytest.mark.parametrize(
    "script", [lambdas, methods, hooks, hooks_removed, modules_inside, forwards]
)
def test_what_cannot_be_found_by_name_stops_a_newcomer(script: Callable[[Rank], None]) -> None:
    undisturbed = run(script)
    for number, tree in enumerate(undisturbed.trees):
        if number < 2:
            assert run(script, tree).log == undisturbed.log[number:]
        else:
            with pytest.raises(UsageError, match="of the rank that is replaced"):
                run(script, tree)


def test_a_retry_has_the_hooks_of_the_entry() -> None:
    net = torch.nn.Identity()

    def script(ks: Rank) -> None:
        def step() -> None:
            net.register_forward_hook(lambda module, inputs, output: output + 1)

        for _ in range(3):
            ks.retries = 2
            ks.step(step)
            ks.log.append(float(net(torch.zeros(1))))

    assert run(script).log == [1.0, 2.0, 3.0]


def test_a_function_that_a_newcomer_is_about_to_define() -> None:
    def script(ks: Rank) -> None:
        for i in range(5):
            ks.step(nothing)

            def report(i: int = i) -> int:
                return 2 * i

            ks.log.append(report())

    check(script)


class Replay(list):  # type: ignore[type-arg]
    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.place = room, 0

    def push(self, item: Any) -> None:
        if len(self) < self.room:
            self.append(item)
        else:
            self[self.place] = item
        self.place = (self.place + 1) % self.room


class Moving(collections.deque):  # type: ignore[type-arg]
    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)
        self.total = 0.0

    def copy(self) -> Any:
        raise AssertionError("nobody but the script copies it")


def test_attributes_of_containers_of_the_scripts_own_classes() -> None:
    def script(ks: Rank) -> None:
        replay, moving, made = Replay(2), Moving(2), []
        for i in range(5):
            ks.step(nothing)
            replay.push(i)
            moving.append(i)
            moving.total += i
            if i % 2:
                made.append(Moving(3))
                made[-1].total = float(i)
            for one in made:
                one.append(i)
            ks.log.append((list(replay), replay.place, list(moving), moving.total))
            ks.log[-1] += tuple((list(one), one.total, one.maxlen) for one in made)

    check(script)


class Config(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def test_a_dict_that_is_its_own_attributes() -> None:
    def script(ks: Rank) -> None:
        kept, anew = Config(rate=1.0, count=0), Config(rate=1.0)
        for i in range(4):
            ks.step(nothing)
            kept.rate *= 0.5
            kept["count"] += i
            anew = Config(rate=anew.rate / 3)
            ks.log.append((dict(kept), kept.count, anew.rate))

    check(script)


def test_containers_that_are_made_again_keep_their_length_and_factory() -> None:
    def script(ks: Rank) -> None:
        windows: dict[str, Any] = {}
        tables: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        for i in range(5):
            ks.step(nothing)
            windows.setdefault("abc"[i % 3], collections.deque(maxlen=2)).append(i)
            windows["a"].append(i)
            tables[i % 2]["x"].append(i)
            ks.log.append((repr(windows), {k: dict(v) for k, v in tables.items()}))

    check(script)


def test_a_factory_without_a_name_is_not_made_again_but_named() -> None:
    def script(ks: Rank) -> None:
        tables: dict[int, Any] = {}
        for i in range(3):
            ks.step(nothing)
            tables[i] = collections.defaultdict(lambda: 7)
            ks.log.append(tables[i][0])

    undisturbed = run(script)
    with pytest.raises(UsageError, match="a defaultdict whose factory has no name"):
        run(script, undisturbed.trees[2])


class Values:
    def __init__(self) -> None:
        self.values: list[int] = []


def test_what_is_inside_a_tuple_of_a_function() -> None:
    def script(ks: Rank, *more: Any) -> None:
        meters, logs = (Values(), Values()), ([], {"deep": ([0],)})
        for i in range(4):
            ks.step(nothing)
            meters[1].values.append(i)
            logs[0].append(i)
            logs[1]["deep"][0].append(-i)
            ks.log.append((list(meters[1].values), repr(logs)))

    check(script)


def test_loops_over_arrays_and_products() -> None:
    def script(ks: Rank) -> None:
        shift = 0
        for rate, size in itertools.product((0.1, 0.2), (4, 8)):
            for rows in (numpy.arange(8) + shift).reshape(-1, 4):
                ks.step(nothing)
                ks.log.append((rate, size, rows.tolist()))
            shift += 10

    check(script)


class Range:
    def __init__(self) -> None:
        self.calls, self.seen = 0, []  # type: ignore[var-annotated]

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        self.seen.append(self.calls)


def test_objects_that_only_hooks_know() -> None:
    def script(ks: Rank) -> None:
        net = torch.nn.Linear(2, 2)
        net.register_forward_hook(Range())
        net.weight.register_hook(Range())
        for _ in range(4):
            ks.step(nothing)
            net(torch.ones(1, 2)).sum().backward()
            hooks = [*net._forward_hooks.values(), *net.weight._backward_hooks.values()]
            ks.log.append([(hook.calls, list(hook.seen)) for hook in hooks])

    check(script)


class Phases:
    def __init__(self) -> None:
        self.pending = 3


def test_names_that_are_deleted_and_defaults_behind_a_star() -> None:
    def step(*, history: list[int] = []) -> None:  # noqa: B006
        history.append(len(history))

    def script(ks: Rank) -> None:
        phases = Phases()
        for i in range(5):
            ks.step(nothing)
            if i == 1:
                del phases.pending
            if i == 3:
                phases.pending = i
            step()
            ks.log.append((vars(phases).copy(), list(step.__kwdefaults__["history"])))
            if i == 4:
                step.__kwdefaults__["history"].clear()

    check(script)


def test_numbers_that_become_others_of_the_same_value() -> None:
    def script(ks: Rank) -> None:
        numbers: list[Any] = [0, 1, True, 0.0]
        for i in range(3):
            ks.step(nothing)
            numbers[i] = [0.0, True, 1.0][i]
            numbers[3] = -0.0
            ks.log.append(repr(numbers))

    check(script)


def every(n: int) -> Any:
    def decorate(function: Any) -> Any:
        calls = 0

        def wrapper(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args) if calls % n == 0 else None

        return wrapper

    return decorate


class Decaying:
    def __init__(self) -> None:
        self.rate = 1.0
        self.factors = self.warm_up()

    def warm_up(self) -> Any:
        yield from (0.25, 0.5)

    def best(self, value: float, found: list[float] = [9.0]) -> float:  # noqa: B006
        found[0] = min(found[0], value)
        return found[0]

    @every(2)
    def decay(self) -> None:
        self.rate *= 0.5


def test_what_methods_keep_and_generators_that_have_ended() -> None:
    def script(ks: Rank) -> None:
        Decaying.best.__defaults__[0][0] = 9.0  # type: ignore[index]
        Decaying.decay.__closure__[0].cell_contents = 0  # type: ignore[index]
        decaying = Decaying()
        for i in range(5):
            factor = next(decaying.factors, None)
            ks.step(nothing)
            decaying.decay()
            ks.log.append((decaying.rate, decaying.best(5.0 - i)))
            factor = next(decaying.factors, None) if i == 2 else factor
            ks.log[-1] += (factor,)

    check(script)


def test_files_in_memory() -> None:
    def script(ks: Rank) -> None:
        buffer, best, text = io.BytesIO(b"first"), None, io.StringIO()
        for i in range(5):
            ks.step(nothing)
            if i == 1:
                best = io.BytesIO()
            if best is not None:
                best.seek(0)
                torch.save(torch.tensor([i]), best)
            buffer.write(bytes([i]))
            text.write(f"{i} ")
            kept = None if best is None else best.getvalue()
            ks.log.append((buffer.getvalue(), buffer.tell(), text.getvalue(), kept))

    check(script)


def test_tuples_inside_of_tuples() -> None:
    def script(ks: Rank) -> None:
        state = (torch.zeros(2), (torch.zeros(1), (torch.ones(1),)))
        for _ in range(5):
            ks.step(nothing)
            first, (second, (third,)) = state
            state = (first + 1, (second - 1, (third * 2,)))
            ks.log.append(str(state))

    check(script)


def test_sets_have_their_order() -> None:
    def script(ks: Rank) -> None:
        pool, names = set(range(100, 164)), {"a", "b"}
        for i in range(6):
            ks.step(nothing)
            taken = list(pool)[:5]
            pool.difference_update(taken)
            pool.add(i)
            names.add(str(i))
            ks.log.append((taken, pool.pop(), list(pool), list(names)))

    check(script)


def test_a_retry_has_the_order_of_a_set() -> None:
    def script(ks: Rank) -> None:
        pool = set(range(64))

        def step() -> None:
            pool.difference_update(list(pool)[:50])
            pool.update(range(200, 210))

        for _ in range(3):
            ks.retries = 1
            ks.step(step)
            ks.log.append(list(pool))

    check_retries(script)


def test_what_scripts_keep_on_parameters() -> None:
    def script(ks: Rank) -> None:
        net = torch.nn.Linear(2, 1)
        net.weight.count = 0
        for i in range(5):
            ks.step(nothing)
            net.weight.count += i
            net.bias.average = getattr(net.bias, "average", torch.zeros(1)) + i
            ks.log.append((net.weight.count, net.bias.average.item()))

    check(script)


def test_what_scripts_set_in_datasets_and_samplers() -> None:
    def script(ks: Rank) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(8))
        subset = torch.utils.data.Subset(data, [0, 1])
        for i in range(5):
            ks.step(nothing)
            subset.indices = [*subset.indices, i]
            data.tensors = (data.tensors[0] + 1,)
            ks.log.append((subset.indices, subset[0][0].item()))

    check(script)


def test_arrays_of_objects() -> None:
    def script(ks: Rank) -> None:
        memory = numpy.zeros(4, dtype=object)
        held = {"late": None}
        for i in range(6):
            ks.step(nothing)
            memory[i % 4] = (numpy.full(2, i), float(i), [i])
            if i == 2:
                held["late"] = numpy.array([None, "x", i], dtype=object)
            if i > 3:
                held["late"][i % 3] = i
            ks.log.append((str(memory), str(held)))

    check(script)


class WarmingUp:
    def __init__(self) -> None:
        self.pending = 3
        self.factors = self.warm_up()

    def warm_up(self) -> Any:
        for i in range(4):
            yield 0.2 * (i + 1)

    def after(self) -> None:
        if hasattr(self, "pending"):
            self.pending -= 1
            if self.pending == 0:
                del self.pending


def test_what_is_deleted_stays_so_for_newcomers_of_newcomers() -> None:
    def script(ks: Rank) -> None:
        warming_up = WarmingUp()
        for _ in range(9):
            factor = next(warming_up.factors, None)
            ks.step(nothing)
            warming_up.after()
            ks.log.append((factor, getattr(warming_up, "pending", None)))

    check(script)


class Sorted(set[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(set.__iter__(self)))


class Known:
    """It is known by its address."""

    def __init__(self) -> None:
        self.age = 0


def test_sets_of_objects_and_of_classes_of_their_own() -> None:
    def script(ks: Rank) -> None:
        active, ordered = {Known()}, Sorted(range(9))
        for i in range(5):
            ks.step(nothing)
            active.add(Known())
            ordered.discard(i)
            ordered.add(40 - i)
            found = [thing in active for thing in active], [x in ordered for x in ordered]
            ks.log.append((found, len(active), list(ordered)))

    check(script)


class Stage(enum.Enum):
    WARM = 1
    MAIN = 2


def test_dicts_with_keys_of_all_kinds() -> None:
    def script(ks: Rank) -> None:
        stages = {Stage.WARM: 1, Stage.MAIN: 2}
        numbers = {numpy.int64(1): "a", (1, 2): "b", frozenset({3}): "c"}
        for i in range(5):
            ks.step(nothing)
            if i == 1:
                del stages[Stage.WARM], numbers[1, 2]
            if i == 3:
                stages[Stage.WARM] = 3
                numbers[1, 2] = "d"
            stages[Stage.MAIN] += 1
            ks.log.append((str(stages), str(numbers)))

    check(script)


def test_objects_as_keys_that_come_and_go_are_refused() -> None:
    def script(ks: Rank) -> None:
        table = {Known(): 0, Known(): 1}
        for i in range(4):
            ks.step(nothing)
            table.pop(next(iter(table)))
            table[Known()] = i
            ks.log.append(list(table.values()))

    trees = run(script).trees
    with pytest.raises(UsageError, match="table has got other keys"):
        run(script, trees[-1])


def test_what_a_generator_does_at_its_end_is_done_once() -> None:
    def script(ks: Rank) -> None:
        ends: list[int] = []

        def numbers() -> Iterator[int]:
            try:
                yield 1
            finally:
                ends.append(len(ends))

        each = numbers()
        next(each)
        for _ in range(5):
            ks.step(nothing)
            next(each, None)
            ks.log.append(list(ends))

    check(script)


def test_views_of_weights_that_are_replaced() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))

    class Names:
        def name_of(self, thing: Any) -> None:
            return None

        def names_by_id(self) -> dict[int, str]:
            return {}

        def owner_of(self, tensor: Any) -> Any:
            return ("weight", weight) if tensor.data_ptr() == weight.data_ptr() else None

        def named(self, name: str) -> Any:
            return weight

    variables = Variables(
        lambda x: x is weight, lambda x: x.data_ptr() == weight.data_ptr(), Names()
    )
    kept: list[Any] = []
    told: list[list[str]] = []
    for i in range(4):
        variables.begin(frames.script_frames())
        variables.capture()
        variables.end()
        told.append([text for text in variables.warnings() if "view of a weight" in text])
        if i == 0:
            kept.append(weight.data)
        if i == 2:
            weight.data = weight.data + 1
    assert [len(texts) for texts in told] == [0, 0, 0, 1]
    assert kept


def test_attributes_that_are_made_and_deleted_again_and_again_are_not_remembered() -> None:
    def script(ks: Rank) -> None:
        thing = Known()
        for i in range(50):
            setattr(thing, f"cache_{i}", i)
            ks.step(nothing)
            delattr(thing, f"cache_{i}")
            ks.log.append(vars(thing).copy())

    trees = run(script).trees
    assert len(trees[-1]) < 2 * len(trees[5])


def test_hooks_that_are_removed_are_let_go() -> None:
    def script(ks: Rank) -> None:
        net = torch.nn.Linear(1, 1)
        known = Counting()
        net.hook = None  # type: ignore[assignment]
        handle = net.register_forward_hook(known)
        gone = weakref.ref(known)
        ks.step(nothing)
        del known
        net.hook = 1  # type: ignore[assignment]
        ks.step(nothing)
        handle.remove()
        ks.step(nothing)
        gc.collect()
        assert gone() is None

    run(script)


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
