"""Values of a msgspec type, straight from its description."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

numbers = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**64 - 1))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a msgspec type, straight from its description."""
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.StructType():
            fields = {f.name: _strategy(f.type) for f in info.fields}
            return st.builds(info.cls, **fields)
        case msgspec.inspect.UnionType():
            return st.one_of([_strategy(one) for one in info.types])
        case msgspec.inspect.LiteralType():
            return st.sampled_from(list(info.values))
        case msgspec.inspect.ListType():
            return st.lists(_strategy(info.item_type), max_size=2)
        case msgspec.inspect.TupleType():
            return st.tuples(*[_strategy(one) for one in info.item_types])
        case msgspec.inspect.DictType():
            return st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), max_size=2)
    simple: dict[type, st.SearchStrategy[Any]] = {
        msgspec.inspect.IntType: st.integers(-(2**63), 2**63 - 1),
        msgspec.inspect.FloatType: st.floats(allow_nan=False),
        msgspec.inspect.StrType: texts,
        msgspec.inspect.BytesType: st.binary(max_size=20),
        msgspec.inspect.BoolType: st.booleans(),
        msgspec.inspect.NoneType: st.none(),
    }
    return simple[type(info)]
