"""The official package ``mlc-chakra``: our schema is its schema, and its tools read what our tests take for an .et."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from export.et_writer import healthy
from handed import DATA, require

from clients.environments import ROOT, environment

# Prints, of each message and enumeration of a file of descriptors, every field with all that is to it.
FIELDS = """
import json, sys
from google.protobuf import descriptor_pb2
def fields(file):
    found = {}
    for message in file.message_type:
        oneofs = [one.name for one in message.oneof_decl]
        found[message.name] = {
            one.name: [one.number, one.type, one.label, one.type_name, oneofs[one.oneof_index] if one.HasField("oneof_index") else ""]
            for one in message.field
        }
    for enum in file.enum_type:
        found[enum.name] = {one.name: one.number for one in enum.value}
    return {"package": file.package, "syntax": file.syntax, "found": found}
"""  # noqa: E501


@pytest.fixture(scope="module")
def programs() -> Path:
    return environment("chakra")


def call(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    env = {**os.environ, **variables}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_every_field_and_number_is_that_of_the_official_package_and_both_live_in_one_process(programs):
    script = FIELDS + (
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from chakra.schema.protobuf import et_def_pb2\n"
        "from chakra_capture.export.et_schema import message\n"
        "theirs, ours = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()\n"
        "et_def_pb2.DESCRIPTOR.CopyToProto(theirs)\n"
        "message('Node').DESCRIPTOR.file.CopyToProto(ours)\n"
        "print(json.dumps([fields(theirs), fields(ours)]))"
    )
    theirs, ours = json.loads(call(programs / "python", "-c", script))
    assert ours == theirs
    assert len(ours["found"]) == 22


def test_our_enumerations_are_those_of_the_schema():
    from chakra_capture.export.et_schema import CollectiveType, NodeType, message

    enums = message("Node").DESCRIPTOR.file.enum_types_by_name
    for ours, name in ((NodeType, "NodeType"), (CollectiveType, "CollectiveCommType")):
        assert {one.name: one.value for one in ours} == {one.name: one.number for one in enums[name].values}


def test_the_checked_in_descriptors_are_what_protoc_makes_of_the_schema(programs):
    script = (
        "import sys; sys.path.insert(0, 'scripts'); import make_et_schema as made; "
        "sys.stdout.write(made.module(made.compiled()))"
    )
    assert call(programs / "python", "-c", script) == Path(ROOT, "chakra_capture/export/_et_def.py").read_text()


def test_its_jsonizer_reads_what_our_tests_take_for_an_et(programs, tmp_path):
    folder = healthy().write(tmp_path)
    out = tmp_path / "out.json"
    call(programs / "chakra_jsonizer", "--input_filename", folder / "chakra.1.et", "--output_filename", out)
    decoder, text, found = json.JSONDecoder(), out.read_text().strip(), []
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].lstrip()
    assert found[0]["version"] == "1.0"
    assert [int(one["id"]) for one in found[1:]] == [*range(1, 9)]
    dumped = call(sys.executable, "-m", "chakra_capture", "inspect", folder / "chakra.1.et", "--dump")
    ours = [json.loads(line) for line in dumped.splitlines()[1:]]
    for left, right in zip(ours, found[1:], strict=True):
        assert left["type"] == right["type"]
        assert left["duration_us"] == int(right["durationMicros"])
        assert left.get("data_deps", []) == [int(one) for one in right.get("dataDeps", [])]


@pytest.fixture(scope="module")
def theirs(programs, tmp_path_factory) -> Path:
    """What the official linker and converter make of a pair of one ResNet-50 process."""
    folder = tmp_path_factory.mktemp("theirs")
    for side in ("host", "device"):
        packed = require(DATA / "pairs" / "resnet50_ddp_twin" / side / "rank-0.json.gz")
        (folder / f"{side}.json").write_bytes(gzip.decompress(packed.read_bytes()))
    # The linker imports a package that is on no index; the one of traces in its own requirements brings it along.
    packages = next((programs.parent / "lib").glob("python*/site-packages"))
    files = ("--chakra-host-trace", folder / "host.json", "--chakra-device-trace", folder / "device.json")
    link = (programs / "chakra_trace_link", "--rank", 0, *files, "--output-file", "linked.json")
    call(*link, cwd=folder, PYTHONPATH=str(packages / "param_bench"))
    convert = ("PyTorch", "--input", "linked.json", "--output", "theirs.0.et")
    call(programs / "chakra_converter", *convert, cwd=folder)
    return folder / "theirs.0.et"


def test_what_is_known_to_be_wrong_with_its_output_is_found(theirs):
    done = subprocess.run(
        [sys.executable, "-m", "chakra_capture", "validate", theirs, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    # ASTRA-sim: "Node 0 in ctrl_dep graph, but not found in index"; node 0 was removed as dangling.
    assert found["V3-ctrl-dangling"]["count"] == 2
    assert {one["detail"] for one in found["V3-ctrl-dangling"]["places"]} == {"depends on node 0"}
    # Of 3660 device nodes none has a successor; two are the last of their streams.
    assert found["V13-no-successor"]["count"] == 3660 - 2
    # Its 21 collectives, of one group, wait for the CPU alone.
    assert found["V16-unchained"]["count"] == 20
    assert set(found) == {"V3-ctrl-dangling", "V6-no-root", "V12-zero-duration", "V13-no-successor", "V16-unchained"}


def test_the_longest_path_of_its_output_is_what_astra_sim_takes(theirs):
    """919.349 ms, once the dependencies on node 0 are taken out, which the walk does not follow either."""
    said = json.loads(call(sys.executable, "-m", "chakra_capture", "inspect", theirs, "--json"))
    assert (said["num_nodes"], said["types"]) == (18050, {"COMP_NODE": 18029, "COMM_COLL_NODE": 21})
    assert {one["kind"]: one["num_nodes"] for one in said["collectives"]} == {"ALL_REDUCE": 15, "BROADCAST": 6}
    assert said["path_us"] == pytest.approx(919_349, abs=1)
