"""Chakra .et files are read as they stand; whatever else is in them ends in one sentence, never in a traceback."""

import gzip
import json
import struct
from contextlib import suppress

import pytest
from commands import process, refused, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chakra_capture.errors import TraceFileError
from chakra_capture.export.et_dump import dump_et
from chakra_capture.export.et_files import find_et
from chakra_capture.export.et_reader import EtFile
from chakra_capture.export.et_records import LARGEST_RECORD
from chakra_capture.export.et_summary import summarize_et
from chakra_capture.export.validation.run import validate_et
from export.et_writer import ALL_REDUCE, Node, attribute, coll, comp, et, healthy, metadata, record, text, varint

WHOLE = et(healthy().ranks[0])


def read(path):
    with EtFile(path) as file:
        return file.metadata, list(file.nodes())


def test_every_field_is_read_as_it_was_written(tmp_path):
    node = Node(2**40, 7, "nccl", (1, 2**63), (3,), start=2**50, dur=9, attrs=(("comm_size", "int64_val", -5),))
    texts = text(8, text(1, "[1]") + text(2, "[[2, 3]]") + text(3, "['Tensor']"))
    path = tmp_path / "a.et"
    path.write_bytes(record(metadata(schema="1.1.1")) + record(node.encoded() + texts))
    head, (found,) = read(path)
    assert (head.version, head.value("schema"), head.value("other")) == ("1.0", "1.1.1", None)
    assert (found.node_id, found.type, found.name) == (2**40, 7, "nccl")
    assert (found.data_deps, found.ctrl_deps) == ((1, 2**63), (3,))
    assert (found.start_us, found.duration_us, found.value("comm_size")) == (2**50, 9, -5)
    assert (found.inputs.values, found.inputs.shapes, found.inputs.types) == ("[1]", "[[2, 3]]", "['Tensor']")
    assert found.outputs is None
    assert found.offset == len(record(metadata(schema="1.1.1")))


@pytest.mark.parametrize(
    ("mark", "length"),
    [(b"\xff\xfe", 127 + (126 << 7) + (1 << 14)), (b"\xfe\xff", 126 + (127 << 7) + (1 << 14)),
     (b"\xef\xbb\xbf", 111 + (59 << 7) + (63 << 14) + (1 << 21))],
)  # fmt: skip
def test_a_length_that_looks_like_the_mark_of_an_encoding_is_a_length(mark, length, tmp_path):
    size = length - (5 if length > 1 << 21 else 4)
    path = tmp_path / "a.et"
    path.write_bytes(record(text(1, "x" * size)) + record(comp(1, start=0, dur=1).encoded()))
    assert path.read_bytes().startswith(mark)
    head, nodes = read(path)
    assert (len(head.version), len(nodes)) == (size, 1)


def test_records_longer_than_what_is_read_at_once(tmp_path):
    long = Node(1, 4, "x" * 700_000)
    path = tmp_path / "a.et"
    path.write_bytes(et([long, long.but(id=2), Node(3, 4, "y")]))
    assert [len(node.name) for node in read(path)[1]] == [700_000, 700_000, 1]


def test_a_gzip_file_is_read_whatever_its_name(tmp_path):
    path = tmp_path / "a.et"
    path.write_bytes(gzip.compress(WHOLE))
    assert len(read(path)[1]) == 8
    path.write_bytes(gzip.compress(WHOLE)[:-20])
    refused(run("inspect", path), "a.et is damaged", "unpacked file", "truncated gzip")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ("is empty",)),
        (b"\0", ("its first record is empty",)),
        (WHOLE[:3], ("its first record claims", "ends after")),
        (b'{"schema": "1.1.1-chakra.0.0.4"}' * 20, ("no Chakra .et file", "JSON")),
        (b"PK\x03\x04" + bytes(200), ("a zip archive",)),
        (b"\x89PNG\r\n" * 50, ("no Chakra .et file",)),
        (b"\xff" * 64, ("does not begin with a length",)),
        (WHOLE + varint(LARGEST_RECORD + 1) + bytes(9), (f"byte {len(WHOLE)}", "16,777,217 bytes")),
        (WHOLE + record(b"\x0a\xff"), (f"byte {len(WHOLE)}", "is no Chakra node")),
        (WHOLE + record(text(2, b"\xff\xfe")), (f"byte {len(WHOLE)}", "is no Chakra node")),
        (WHOLE + record(text(10, b"") * 10_001), ("10,001 attributes",)),
        (record(text(2, b"") * 10_001), ("10,001 attributes",)),
    ],
)
def test_damage_ends_in_one_sentence_with_its_byte(data, parts, tmp_path):
    path = tmp_path / "a.et"
    path.write_bytes(data)
    for options in ((), ("--json",), ("--dump",)):
        assert refused(run("inspect", path, *options), *parts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_end_in_a_traceback(tmp_path, data):
    """Bytes of a file changed, cut out, doubled or cut off: either it is read, or one error says what is wrong."""
    changed = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        kind = data.draw(st.sampled_from(["set", "cut", "double", "end", "insert"]))
        length = data.draw(st.integers(1, 30))
        if kind == "set":
            changed[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "cut":
            del changed[at : at + length]
        elif kind == "double":
            changed[at:at] = changed[at : at + length]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(max_size=8))
        else:
            del changed[at:]
    path = tmp_path / "chakra.0.et"
    path.write_bytes(changed)
    validate_et(find_et(path))  # whatever is in the file is a finding
    for asked in (summarize_et, lambda path: list(dump_et(path))):
        with suppress(TraceFileError):
            asked(path)


def test_a_claimed_length_takes_no_memory(tmp_path):
    path = tmp_path / "a.0.et"
    path.write_bytes(record(metadata()) + varint(LARGEST_RECORD) + b"x")
    # Each attribute is two bytes here, and far more once it is read.
    (tmp_path / "b.0.et").write_bytes(record(metadata()) + record(text(10, b"") * (LARGEST_RECORD // 2)))
    limit = 3 << 30
    before = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    for name in ("a.0.et", "b.0.et"):
        refused(process("inspect", tmp_path / name, before=before), f"{name} is damaged")


def test_inspect_sums_up_what_the_file_says(tmp_path):
    folder = healthy().write(tmp_path)
    said = json.loads(run("inspect", folder / "chakra.1.et", "--json").out)
    assert said["schema_version"] == 1
    assert said["types"] == {"COMP_NODE": 4, "COMM_RECV_NODE": 1, "COMM_COLL_NODE": 3}
    assert {one["kind"]: (one["num_nodes"], one["num_bytes"]) for one in said["collectives"]} == {
        "ALL_REDUCE": (1, 4096), "REDUCE_SCATTER": (1, 2048), "ALL_GATHER": (1, 1024), "RECV": (1, 512),
    }  # fmt: skip
    assert {one["kind"]: (one["num_nodes"], one["num_bytes"]) for one in said["groups"]} == {
        "1": (2, 5120),
        "2": (1, 2048),
    }
    assert (said["num_nodes"], said["num_on_cpu"], said["data_deps"], said["ctrl_deps"]) == (8, 2, 7, 1)
    assert (said["num_roots"], said["dangling"], said["num_never_run"]) == (1, 0, 0)
    assert (said["span_us"], said["duration_us"], said["path_us"], said["path_nodes"]) == (145, 145, 145, 8)


def test_the_longest_path_is_by_duration_not_by_number_of_nodes(tmp_path):
    nodes = [
        comp(1, start=0, dur=5),
        comp(2, (1,), start=5, dur=1),
        comp(3, (2,), start=6, dur=1),
        comp(9, (1,), start=5, dur=40, name="long"),
        comp(5, (3, 9), start=45, dur=7),
        comp(6, (5, 77), start=60, dur=1),
        comp(7, (8,), start=0, dur=500),
        comp(8, (7,), start=0, dur=500),
    ]
    (tmp_path / "a.et").write_bytes(et(nodes))
    said = json.loads(run("inspect", tmp_path / "a.et", "--json").out)
    assert (said["path_us"], said["path_nodes"]) == (5 + 40 + 7 + 1, 4)
    assert [(one["name"], one["duration_us"]) for one in said["on_path"]] == [
        ("long", 40), ("work 5", 7), ("work 1", 5), ("work 6", 1),
    ]  # fmt: skip
    assert (said["dangling"], said["num_never_run"]) == (1, 2)


def test_a_dump_has_one_line_of_json_for_each_record(tmp_path):
    odd = coll(2, (1,), ALL_REDUCE, 8, "1", start=1, dur=1)
    odd = odd.but(name="a\n\x1b[31m\x7f", attrs=(*odd.attrs, ("comm_size", "double_val", float("nan"))))
    raw = odd.but(id=3).encoded() + text(10, text(1, "raw") + text(31, b"\xff\x00"))
    raw += text(10, text(1, "list") + text(10, text(1, varint(1) + varint(2))))
    path = tmp_path / "a.et"
    path.write_bytes(et([comp(1, start=0, dur=1), odd]) + record(raw))
    done = run("inspect", path, "--dump")
    assert (done.code, done.err) == (0, "")
    assert done.out.replace("\n", "").isprintable()
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert lines[0] == {"version": "1.0", "attrs": {}}
    assert lines[1] == {
        "id": 1, "type": "COMP_NODE", "duration_us": 1, "name": "work 1", "attrs": {"is_cpu_op": False, "stream": 7},
    }  # fmt: skip
    assert lines[2]["name"] == "a\n\x1b[31m\x7f"
    assert (lines[2]["attrs"]["comm_size"], lines[2]["attrs"]["comm_size#2"]) == (8, "nan")
    assert (lines[3]["attrs"]["raw"], lines[3]["attrs"]["list"]) == ("ff00", [1, 2])


def test_only_a_file_can_be_dumped(tmp_path):
    assert run("inspect", tmp_path, "--dump").code == 2


def test_the_writer_of_these_tests_writes_what_protobuf_says():
    """A float in a field of attributes: the writer's own encoding, checked once by hand."""
    assert attribute("a", "double_val", 1.0) == b"\x0a\x01a\x19" + struct.pack("<d", 1.0)
    assert varint(300) == b"\xac\x02"
