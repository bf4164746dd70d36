"""No text of a trace survives in an anonymous export, while times, structure and communication stay."""

import re

import polars as pl
import pytest
from commands import process
from handed import DATA, require
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.export.anonymize import Anonymizer
from chakra_capture.export.et_reader import EtFile

PUBLIC = re.compile(r"ProfilerStep#\d+|\[pytorch\|.*|record_param_comms|(?:gloo|nccl|c10d)::?\w+|\(no op\)")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """The twin pair merged, and its full exports: as it is, and anonymous."""
    folder = tmp_path_factory.mktemp("anonymous")
    pair = require(DATA / "pairs" / "resnet50_ddp_twin")
    assert process("merge", pair, "--force", "-o", folder / "merged").code == 0
    for name, more in (("plain", ()), ("hidden", ("--anonymize",))):
        told = process("export", "et", folder / "merged", "--profile", "full", "-o", folder / name, *more)
        assert (told.code, told.err) == (0, "")
    return folder


@pytest.fixture(scope="module")
def nodes(exports):
    """Nodes of both exports, as they are and hidden."""
    return [read(exports / name / "chakra.0.et") for name in ("plain", "hidden")]


def read(path):
    with EtFile(path) as file:
        return list(file.nodes())


def test_no_name_of_the_trace_is_in_the_bytes(exports, nodes):
    table = pl.read_parquet(exports / "merged/rank=0/nodes.parquet", columns=["name"])
    names = {name for name in table["name"].unique() if not PUBLIC.fullmatch(name)}
    assert len(names) > 100
    data = (exports / "hidden/chakra.0.et").read_bytes()

    # Short ones such as "Trace" may stand in other words by chance: they are looked for among the names written.
    assert [name for name in names if len(name) > 8 and name.encode() in data] == []
    written = {node.name for node in nodes[1]}
    assert names & written == set()


def test_times_structure_and_communication_stay(exports, nodes):
    plain, hidden = nodes

    def kept(node):
        attributes = [(one.name, one.value) for one in node.attributes]
        return (node.node_id, node.type, node.data_deps, node.ctrl_deps, node.start_us, node.duration_us, attributes)

    assert list(map(kept, hidden)) == list(map(kept, plain))
    groups = [(exports / name / "comm_group.json").read_text() for name in ("plain", "hidden")]
    assert groups[0] == groups[1]


def test_equal_names_stay_equal_and_different_ones_different(nodes):
    plain, hidden = nodes

    pairs = {(one.name, other.name) for one, other in zip(plain, hidden, strict=True)}
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


@pytest.mark.parametrize("kind", ["chakra-json", "graph"])
def test_other_exports_hide_names_too(exports, tmp_path, kind):
    more = ("--max-nodes", "100000") if kind == "graph" else ()
    told = process("export", kind, exports / "merged", "-o", tmp_path / "out", "--anonymize", *more)
    assert (told.code, told.err) == (0, "")
    (path,) = (tmp_path / "out").iterdir()
    data = path.read_bytes()
    table = pl.read_parquet(exports / "merged/rank=0/nodes.parquet", columns=["name", "kind"])

    names = {name for name in table["name"].unique() if not PUBLIC.fullmatch(name) and len(name) > 8}
    # Kernels that communicate are named for their collective, and some names are words of both formats.
    assert [name for name in names if name.encode() in data and not name.startswith("nccl")] == []
    assert data.count(b"ProfilerStep#5") == 1
    for secret in (b"aten::", b"cutlass", b"DistributedDataParallel", b"3,7,7", b"224,224"):
        assert secret not in data, secret


def test_every_export_has_a_key_of_its_own():
    assert Anonymizer().name("model.secret") != Anonymizer().name("model.secret")


@pytest.mark.parametrize(
    ("given_", "written"),
    [("[[3,224,224],[]]", "[[4,256,256],[]]"), ("[0, 1, 2, 5]", "[0, 1, 2, 8]"), ("[['s', 65]]", "[[, 128]]")],
)
def test_dimensions_are_rounded_up_to_powers_of_two(given_, written):
    assert Anonymizer().shapes(given_) == written


def test_types_of_torch_stay_and_others_do_not():
    hider = Anonymizer()

    assert hider.types('["Tensor(float)","GenericList[Tensor(c10::BFloat16)]"]') == (
        '["Tensor(float)","GenericList[Tensor(c10::BFloat16)]"]'
    )
    assert "Secret" not in hider.types('["__torch__.torch.classes.mine.Secret"]')


@given(st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=8))
def test_columns_of_a_table_are_hidden_like_single_texts(names):
    hider = Anonymizer(b"key")
    table = pl.DataFrame({"name": names, "args": names}, schema={"name": pl.String, "args": pl.String})

    found = hider.nodes(table)
    assert found["name"].to_list() == [None if name is None else hider.name(name) for name in names]
    assert found["args"].to_list() == ["{}"] * len(names)


def test_kernels_that_communicate_keep_their_collective():
    name = Anonymizer().name("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)")

    assert re.fullmatch(r"ncclDevKernel_AllReduce_[0-9a-f]{10}", name)
