from __future__ import annotations

import contextlib
import enum
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import RemoteProtocolError, UsageError
from keepstep.worker.state import codec

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
trees = st.recursive(
    hashable | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_equal_and_of_the_same_types(tree: Any) -> None:
    assert same(codec.loads_inline(codec.dumps_inline(tree)), tree)
    data, tensors = codec.dumps(tree)
    assert tensors == [] and same(codec.loads(data, []), tree)


@given(st.sets(st.text() | st.integers()))
@settings(deadline=None)
def test_equal_sets_give_equal_bytes(values: set[Any]) -> None:
    backwards: set[Any] = set()
    for value in reversed(list(values)):
        backwards.add(value)
    assert codec.dumps_inline(values) == codec.dumps_inline(backwards)


def test_lone_surrogates_and_big_numbers_survive() -> None:
    tree = ["\ud800", 1 << 200, -(1 << 64), (1 << 64) - 1, math.inf, -0.0]
    assert same(codec.loads_inline(codec.dumps_inline(tree)), tree)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)], ids=str)
def test_tensors_of_every_dtype_survive_inline(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    raw = torch.arange(count * 16, dtype=torch.uint8)[: count * dtype.itemsize] % 2
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    back = codec.loads_inline(codec.dumps_inline({"t": tensor}))["t"]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert codec.dumps_inline(back) == codec.dumps_inline(tensor)


def test_views_and_conjugates_are_stored_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    turned, conjugate = base.t()[1:], torch.tensor([1 + 2j, 3 - 1j]).conj()
    back = codec.loads_inline(codec.dumps_inline([turned, conjugate]))
    assert torch.equal(back[0], turned) and torch.equal(back[1], conjugate)


def test_tensors_beside_the_bytes_are_the_same_objects_and_listed_once() -> None:
    a, b = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    data, tensors = codec.dumps({"x": [a, b], "y": a})
    assert len(tensors) == 2 and tensors[0] is a and tensors[1] is b
    fresh = [torch.full((2,), 5.0), torch.full((3,), 6.0)]
    back = codec.loads(data, fresh)
    assert back["x"][0] is fresh[0] is back["y"] and back["x"][1] is fresh[1]


def test_torch_and_numpy_values() -> None:
    tree = {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "f8": numpy.float64(0.1),
        "i4": numpy.int32(-7),
        "bool": numpy.bool_(True),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {1: [2]}),
        "counter": Counter("aab"),
        "bytearray": bytearray(b"xyz"),
    }
    back = codec.loads_inline(codec.dumps_inline(tree))
    assert back == tree
    assert type(back["f8"]) is numpy.float64 and type(back["size"]) is torch.Size
    assert type(back["default"]) is dict and type(back["counter"]) is Counter
    for array in (numpy.arange(6).reshape(2, 3).T, numpy.zeros((0, 2)), numpy.array(3.5)):
        copy = codec.loads_inline(codec.dumps_inline(array))
        assert numpy.array_equal(copy, array) and copy.dtype == array.dtype
        copy[...] = 1  # writable


class Colour(enum.IntEnum):
    RED = 1


class Thing:
    pass


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, Thing()]}, "state['a'][1]"),
        ({"a": {3: lambda: 0}}, "state['a'][3]"),
        ([Colour.RED], "state[0]"),
        ({"o": numpy.array([object()])}, "state['o']"),
        ((torch.eye(2).to_sparse(),), "state[0]"),
        ({torch.ones(1): 1}, "key"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(tree: Any, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec.dumps_inline(tree)
    assert place in str(caught.value) and "ks.register(name, save, load)" in str(caught.value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        codec.dumps_inline(loop)


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_garbage_is_a_protocol_error_or_a_value(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        codec.loads_inline(data)
