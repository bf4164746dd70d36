"""Bytes of nodes, written column by column: protobuf reads the same from them as it was asked to write."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.export.et_schema import message
from chakra_capture.export.making import encode
from chakra_capture.export.making.encode import Encodable, add_attribute, encoded, metadata_record
from chakra_capture.export.making.weave import is_built, weave
from chakra_capture.merge import nest
from chakra_capture.trace.columns import MISSING

SIZES = st.one_of(st.integers(0, 300), st.integers(0, 2**62))


def records(data: bytes) -> list[bytes]:
    """Records by their length, read without our reader."""
    file, found = io.BytesIO(data), []
    while head := file.read(1):
        length = shift = 0
        while True:
            length |= (head[0] & 0x7F) << shift
            shift += 7
            if head[0] < 0x80:
                break
            head = file.read(1)
        found.append(file.read(length))
        assert len(found[-1]) == length
    return found


@st.composite
def nodes(draw):
    size = draw(st.integers(0, 12))
    kinds = draw(st.lists(st.text(max_size=200), min_size=1, max_size=4))
    deps = [sorted(draw(st.sets(SIZES.filter(bool), max_size=9))) for _ in range(size)]
    column = st.lists(SIZES, min_size=size, max_size=size)
    optional = st.lists(st.one_of(SIZES, st.just(MISSING)), min_size=size, max_size=size)
    return {
        "ids": draw(column), "kind": draw(st.lists(st.integers(0, len(kinds) - 1), min_size=size, max_size=size)),
        "names": kinds, "start": draw(column), "duration": draw(column), "deps": deps, "ctrl": draw(optional),
        "numbers": draw(st.dictionaries(st.text(max_size=300), optional, max_size=3)),
    }  # fmt: skip


def encodable(given_: dict) -> Encodable:
    counts = [len(deps) for deps in given_["deps"]]
    return Encodable(
        np.array(given_["ids"], dtype=np.int64),
        np.array(given_["kind"], dtype=np.int64),
        [message("Node")(name=name, type=4).SerializeToString() for name in given_["names"]],
        np.array(given_["start"], dtype=np.int64),
        np.array(given_["duration"], dtype=np.int64),
        np.append(0, np.cumsum(counts)).astype(np.int64),
        np.array([one for deps in given_["deps"] for one in deps], dtype=np.int64),
        np.array(given_["ctrl"], dtype=np.int64),
        {name: np.array(values, dtype=np.int64) for name, values in given_["numbers"].items()},
    )


@given(nodes(), st.integers(1, 5))
def test_protobuf_reads_what_was_to_be_written(wanted, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_BLOCK", block)
        found = records(b"".join(encoded(encodable(wanted))))

    assert len(found) == len(wanted["ids"])
    for at, data in enumerate(found):
        expected = message("Node")(
            id=wanted["ids"][at],
            name=wanted["names"][wanted["kind"][at]],
            type=4,
            start_time_micros=wanted["start"][at],
            duration_micros=wanted["duration"][at],
            data_deps=wanted["deps"][at],
            ctrl_deps=[] if wanted["ctrl"][at] == MISSING else [wanted["ctrl"][at]],
        )
        for name, values in wanted["numbers"].items():
            if values[at] != MISSING:
                expected.attr.add(name=name, int64_val=values[at])
        assert message("Node").FromString(data) == expected


def test_metadata_comes_as_one_record_with_typed_attributes():
    (data,) = records(metadata_record("0.0.4", {"rank": 3, "profile": "astra", "steps": [5, 6], "whole": True}))

    read = message("GlobalMetadata").FromString(data)
    assert read.version == "0.0.4"
    assert [(one.name, one.WhichOneof("value")) for one in read.attr] == [
        ("rank", "int64_val"), ("profile", "string_val"), ("steps", "int64_list"), ("whole", "bool_val"),
    ]  # fmt: skip
    assert list(read.attr[2].int64_list.values) == [5, 6]


def test_attribute_keeps_false_and_zero():
    node = message("Node")()
    add_attribute(node.attr.add(), "is_cpu_op", False)
    add_attribute(node.attr.add(), "root_rank", 0)

    again = message("Node").FromString(node.SerializeToString())
    assert [one.WhichOneof("value") for one in again.attr] == ["bool_val", "int64_val"]


@given(st.lists(st.tuples(st.binary(max_size=6), st.integers(0, 2)), max_size=8))
def test_records_are_put_together_alike_in_c_and_in_python(parts):
    shared = [b"", b"one", b"\0two"]
    own, kind = b"".join(part for part, _ in parts), np.array([one for _, one in parts], dtype=np.int64)
    sizes = np.array([len(part) for part, _ in parts], dtype=np.int64)

    expected = b"".join(part + shared[one] for part, one in parts)
    for compiled in (True, False):
        assert weave(own, sizes, shared, kind, compiled=compiled) == expected


def test_the_c_part_is_there_where_the_other_c_parts_are():
    assert is_built() == nest.is_built()
