"""The official package ``mlc-chakra``: our schema is its schema, and its tools read what our tests take for an .et."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from builder import TraceBuilder
from export.et_writer import healthy
from handed import DATA, load_json, require
from oracle import kind_of, to_ns

from chakra_capture.export.chakra_json.kernels import kernel_name, taken_for
from chakra_capture.export.et_reader import EtFile
from chakra_capture.export.et_schema import CollectiveType, NodeType
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


def objects(path: Path) -> list[dict]:
    """What the jsonizer writes: JSON objects one after the other, which is no JSON document."""
    decoder, text, at, found = json.JSONDecoder(), path.read_text().strip(), 0, []
    while at < len(text):
        one, at = decoder.raw_decode(text, at)
        found.append(one)
        while at < len(text) and text[at].isspace():
            at += 1
    return found


@pytest.mark.parametrize("profile", ["astra", "full"])
def test_its_jsonizer_and_visualizer_read_what_we_export(programs, tmp_path, profile):
    pair = require(DATA / "pairs" / "simple_add_by_order")
    own = (sys.executable, "-m", "chakra_capture")
    call(*own, "merge", pair, "-o", tmp_path / "merged")
    call(*own, "export", "et", tmp_path / "merged", "--profile", profile, "-o", tmp_path / "et")
    trace, out, drawn = tmp_path / "et/chakra.0.et", tmp_path / "out.json", tmp_path / "out.graphml"
    call(programs / "chakra_jsonizer", "--input_filename", trace, "--output_filename", out)
    call(programs / "chakra_visualizer", "--input_filename", trace, "--output_filename", drawn)

    head, *nodes = objects(out)
    assert {one["name"]: one.get("stringVal") for one in head["attr"]}["profile"] == profile
    with EtFile(trace) as file:
        ours = list(file.nodes())
    assert [int(one["id"]) for one in nodes] == [one.node_id for one in ours]
    for theirs, node in zip(nodes, ours, strict=True):
        assert theirs["type"] == NodeType(node.type).name
        assert int(theirs.get("durationMicros", 0)) == node.duration_us
        assert int(theirs["startTimeMicros"]) == node.start_us
        assert [int(one) for one in theirs.get("dataDeps", [])] == list(node.data_deps)
        assert theirs.get("name", "") == node.name
    graph = ElementTree.parse(drawn).getroot()
    space = "{http://graphml.graphdrawing.org/xmlns}"
    assert len(graph.findall(f".//{space}node")) == len(ours)
    # It draws both kinds of dependencies, each pair once.
    pairs = {(one.node_id, dep) for one in ours for dep in (*one.data_deps, *one.ctrl_deps)}
    assert len(graph.findall(f".//{space}edge")) == len(pairs)


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


# Its converter on our linked JSON.


def merged(path: Path, out: Path, *options: str) -> Path:
    call(sys.executable, "-m", "chakra_capture", "merge", path, "-o", out, *options)
    return out


def converted(programs: Path, run: Path, folder: Path) -> dict[int, Path]:
    """What the official converter makes of our export of each rank of a merged run."""
    folder.mkdir(exist_ok=True)
    export = ("export", "chakra-json", run, "-o", folder / "linked", "--json")
    report = json.loads(call(sys.executable, "-m", "chakra_capture", *export))
    found = {}
    for rank in report["ranks"]:
        (file,) = rank["files"]
        found[rank["rank"]] = folder / f"theirs.{rank['rank']}.et"
        convert = ("PyTorch", "--input", file["file"], "--output", found[rank["rank"]])
        call(programs / "chakra_converter", *convert, cwd=folder)
    return found


def nodes_of(path: Path):
    with EtFile(path) as file:
        return list(file.nodes())


def check_dependencies(nodes):
    """Every dependency is on a node that is there and comes before; nothing depends on the process that was removed."""
    seen = set()
    for node in nodes:
        assert set(node.data_deps) | set(node.ctrl_deps) <= seen
        assert node.value("is_cpu_op") or len(node.ctrl_deps) == len(node.data_deps) == 1
        seen.add(node.node_id)


def test_its_converter_keeps_all_of_the_twin_pair_that_its_own_linker_loses(programs, tmp_path):
    pair = DATA / "pairs" / "resnet50_ddp_twin"
    host, device = require(pair / "host" / "rank-0.json.gz"), pair / "device" / "rank-0.json.gz"
    run = tmp_path / "run"
    call(sys.executable, "-m", "chakra_capture", "merge", "--host", host, "--device", device, "-o", run, "--force")
    nodes = nodes_of(converted(programs, run, tmp_path / "o")[0])
    check_dependencies(nodes)
    events = load_json(device)["traceEvents"]
    ran = [one for one in events if one["ph"] == "X" and kind_of(one) in ("kernel", "memcpy", "memset")]
    on_device = [node for node in nodes if not node.value("is_cpu_op")]
    # 114 memsets more than with its linker; all of the host trace's 14391 nodes but the process, which it removes.
    assert (len(ran), len(on_device), len(nodes)) == (3774, 3774, 3774 + 14390)
    assert Counter((n.name, n.value("stream"), n.duration_us) for n in on_device) == Counter(
        (one["name"], one["args"]["stream"], to_ns(one["dur"]) // 1000) for one in ran
    )
    # It cuts each duration to whole microseconds.
    true_us = sum(to_ns(one["dur"]) for one in ran) / 1000
    assert 0 <= true_us - sum(node.duration_us for node in on_device) < len(ran)
    stated = [one for one in ran if "Collective name" in one["args"]]
    size, kinds = {"Float": 4, "Long": 8}, {"allreduce": "ALL_REDUCE", "broadcast": "BROADCAST"}
    communication = [node for node in nodes if node.type == NodeType.COMM_COLL_NODE]
    assert len(communication) == 21
    assert Counter((n.value("comm_type"), n.value("comm_size"), n.value("pg_name")) for n in communication) == Counter(
        (
            CollectiveType[kinds[one["args"]["Collective name"]]],
            one["args"]["In msg nelems"] * size[one["args"]["dtype"]],
            one["args"]["Process Group Name"],
        )
        for one in stated
    )


def test_its_converter_reads_two_ranks_of_our_own_on_gloo(programs, tmp_path):
    run = merged(ROOT / "traces" / "digits_ddp2_gloo", tmp_path / "run")
    for rank, path in converted(programs, run, tmp_path / "o").items():
        nodes = nodes_of(path)
        check_dependencies(nodes)
        host = load_json(ROOT / "traces" / "digits_ddp2_gloo" / "0_chakra" / f"rank-{rank}.json.gz")["nodes"]
        theirs = Counter(node["name"] for node in host if not node["name"].startswith("[pytorch"))
        assert Counter(node.name for node in nodes if not node.name.startswith("[pytorch")) == theirs
        assert {NodeType(node.type).name for node in nodes} == {"COMP_NODE", "METADATA_NODE"}
        assert all(node.value("is_cpu_op") for node in nodes)


def test_its_converter_ends_at_none_of_four_ranks_with_kernels_called_sendrecv(programs, tmp_path):
    """With its own linker it raises on every rank: 'ncclKernel_SendRecv' is no collective that it knows."""
    pair = require(DATA / "pairs" / "dlrm_8gpu_by_order")
    run = merged(pair, tmp_path / "run")
    for rank, path in converted(programs, run, tmp_path / "o").items():
        nodes = nodes_of(path)
        check_dependencies(nodes)
        events = load_json(pair / "device" / f"rank-{rank}.json.gz")["traceEvents"]
        ran = [one for one in events if one["ph"] == "X" and kind_of(one) in ("kernel", "memcpy", "memset")]
        assert sum(not node.value("is_cpu_op") for node in nodes) == len(ran)
        called = Counter("SendRecv" in one["name"] for one in ran if one["name"].startswith("nccl"))
        types = Counter(node.value("comm_type") for node in nodes if node.type == NodeType.COMM_COLL_NODE)
        assert types == {CollectiveType.ALL_TO_ALL: called[True], CollectiveType.ALL_REDUCE: called[False]}


@pytest.mark.parametrize("file", ["small_schema_1.0.2", "pt2_schema_1.1.1"])
def test_its_converter_reads_host_traces_alone(programs, tmp_path, file):
    host = require(DATA / "host_only" / f"{file}.json.gz")
    run = tmp_path / "run"
    call(sys.executable, "-m", "chakra_capture", "merge", "--host", host, "-o", run)
    nodes = nodes_of(converted(programs, run, tmp_path / "o")[0])
    check_dependencies(nodes)
    theirs = Counter(node["name"] for node in load_json(host)["nodes"] if not node["name"].startswith("[pytorch"))
    assert Counter(node.name for node in nodes if not node.name.startswith("[pytorch")) == theirs


def test_its_converter_comes_back_over_thousands_of_ops_on_two_threads(programs, tmp_path):
    """It looks for circles by recursion: an op that waits for a long thread, a launch after very many ops."""
    builder = TraceBuilder().op("whole", 0, 90_000)
    for number in range(1500):
        builder.op("aten::add", 10 * number + 1, 2)
    engine = "autograd::engine::evaluate_function: AddBackward0"
    builder.op("aten::mul", 20_000, 5, **{"Sequence number": 9})
    for number in range(1500):
        sequence = {"Sequence number": 9} if number == 0 else {}
        builder.op(engine if number == 0 else "aten::t", 30_000 + 10 * number, 5, tid=12, **sequence)
    builder.launched("gemm", 95_000, 5, 7, at=80_000).launched("bare", 99_000, 5, 8, at=95_000)
    run = merged(builder.write(tmp_path / "run"), tmp_path / "m")
    nodes = nodes_of(converted(programs, run, tmp_path / "o")[0])
    check_dependencies(nodes)
    assert (len(nodes), sum(not node.value("is_cpu_op") for node in nodes)) == (3006, 2)


def test_its_converter_tells_sends_receives_and_reductions_of_our_names(programs, tmp_path):
    kernels = [
        ("ncclKernel_SendRecv_RING_SIMPLE", "send", "nccl:send 0->1"),
        ("ncclDevKernel_SendRecv(args)", "recv", "nccl:recv 0<-1"),
        ("ncclDevKernel_SendRecv(args)", None, "nccl:coalesced"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce", "nccl:reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LL", "reducescatter", "nccl:reduce_scatter"),
    ]
    builder = TraceBuilder()
    for number, (name, collective, op) in enumerate(kernels):
        at = 100 * number
        stated = {"In msg nelems": 6, "Out msg nelems": 6, "dtype": "Float", "Process Group Name": "pp"}
        args = {} if collective is None else {"Collective name": collective, **stated}
        builder.op(op, at, 20).runtime("cudaLaunchKernel", at + 5, 1, number + 1)
        builder.kernel(name, at + 30, 10, number + 1, **args)
    run = merged(builder.write(tmp_path / "run"), tmp_path / "m")
    nodes = nodes_of(converted(programs, run, tmp_path / "o")[0])
    check_dependencies(nodes)
    found = [node for node in nodes if not node.value("is_cpu_op")]
    told = [(NodeType(n.type).name, n.value("comm_type"), n.value("comm_size"), n.value("pg_name")) for n in found]
    assert told == [
        ("COMM_SEND_NODE", None, 24, "pp"),
        ("COMM_RECV_NODE", None, 24, "pp"),
        ("COMP_NODE", None, None, None),
        ("COMM_COLL_NODE", CollectiveType.ALL_REDUCE, 24, "pp"),
        ("COMM_COLL_NODE", CollectiveType.REDUCE_SCATTER, 24, "pp"),
    ]


WORDS = ["nccl", "ncclDevKernel", "ncclKernel", "Symk", "_", "-", "SendRecv", "AllReduce", "AllGather", "broadcast",
         "Reduce", "Scatter", "AllToAll", "("]  # fmt: skip


def test_a_name_means_to_its_converter_what_we_take_it_to_mean(programs, tmp_path):
    """Its own functions on names made at random, as they are and as we write them."""
    pick = random.Random(7)
    cases = []
    for _ in range(3000):
        name = "".join(pick.choices(WORDS, k=pick.randint(1, 4)))
        op = pick.choice(["nccl:send 0->1", "nccl:recv 0<-1", "nccl:all_to_all", "nccl:coalesced", "c10d::x", ""])
        collective = pick.choice(["all_reduce", "all_to_all", "all_gather", "reduce", "send", "recv", "send_recv"])
        named = kernel_name(name, collective, op)
        cases += [(name, op, taken_for(name, op)), (named.name, op, named.taken_for)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = """
import json, sys
from types import SimpleNamespace as Node
from chakra.schema.protobuf import et_def_pb2 as schema
from chakra.src.converter.pytorch_converter import PyTorchConverter
its, wrong = PyTorchConverter(), []
for name, op, ours in json.load(open(sys.argv[1])):
    parent = Node(name=op, parent=1, pg_name="")
    node = Node(name=name, parent=0, is_metadata_op=lambda: False, is_gpu_op=lambda: True)
    kind = its.get_protobuf_node_type_from_json_node({0: parent, 1: parent}, node)
    theirs = {schema.COMM_SEND_NODE: "send", schema.COMM_RECV_NODE: "recv", schema.COMP_NODE: "compute"}.get(kind)
    if theirs is None:
        try:
            theirs = schema.CollectiveCommType.Name(its.get_collective_comm_type(name)).lower()
        except ValueError:
            pass
    if theirs != ours:
        wrong.append((name, op, theirs, ours))
print(json.dumps(wrong))
"""
    assert json.loads(call(programs / "python", "-c", script, tmp_path / "cases.json")) == []
