"""What the arguments of a row say of its communication, in every schema; expected values counted by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.merge.comm_facts import (
    NOTHING,
    dtype_name,
    facts_of_args,
    facts_of_dims,
    facts_of_op,
    facts_of_record,
)


def tensor(count, width):
    return [60, 61, 0, count, width, "cuda:0"]


def given_facts(facts):
    """What is stated, without what is not."""
    names = facts.__slots__
    return {name: getattr(facts, name) for name in names if getattr(facts, name) is not None}


def test_kernel_states_all_of_it():
    args = {
        "Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 512, "Out msg nelems": 1024,
        "Group size": 2, "Process Group Name": "3", "Process Group Description": "mesh_tp",
        "Process Group Ranks": "[4, 5]", "Seq": 17,
    }  # fmt: skip
    assert given_facts(facts_of_args(json.dumps(args))) == {
        "collective": "all_gather", "dtype": "bfloat16", "in_bytes": 1024, "out_bytes": 2048, "group_size": 2,
        "process_group": "3", "description": "mesh_tp", "ranks": (4, 5), "seq": 17,
    }  # fmt: skip


def test_members_of_a_list_that_was_cut_follow_from_start_and_stride():
    args = {"Collective name": "allreduce", "Process Group Ranks": "[0, 2, ..., 62]", "Global rank start": 0,
            "Global rank stride": 2, "Group size": 32}  # fmt: skip
    assert facts_of_args(json.dumps(args)).ranks == tuple(range(0, 64, 2))


def test_send_names_its_target_and_recv_its_source():
    args = {"Collective name": "send", "Src Rank": 0, "Dst Rank": 3}
    assert facts_of_args(json.dumps(args)).peer == 3
    assert facts_of_args(json.dumps({**args, "Collective name": "recv"})).peer == 0


def test_record_of_schema_1_1_has_attributes():
    details = json.dumps({"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 100, "out_msg_nelems": 100,
                          "pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "global_rank_start": 4,
                          "global_rank_stride": 1})  # fmt: skip
    inputs = json.dumps([[tensor(100, 4)], 33, ["0", "default_pg"], 0, "allreduce", [], [], 4, 1, 2])
    facts = given_facts(facts_of_record(details, inputs, "[]", "[]", {}))
    assert facts["in_bytes"] == facts["out_bytes"] == 400
    assert (facts["process_group"], facts["ranks"], facts["seq"]) == ("0", (4, 5), 33)


def test_record_of_schema_1_0_3_names_the_group_in_its_inputs():
    inputs = json.dumps([[tensor(53120, 4)], 33, ["0", "default_pg"], 0, "broadcast", [], [], 0, 1, 1])
    types = json.dumps(["GenericList[Tensor(float)]", "Int", "Tuple[String,String]", "Int", "String"])
    facts = facts_of_record("{}", inputs, types, json.dumps([[tensor(53120, 4)]]), {})
    assert given_facts(facts) == {
        "collective": "broadcast", "process_group": "0", "description": "default_pg", "dtype": "float32",
        "in_bytes": 212480, "out_bytes": 212480, "seq": 33,
    }  # fmt: skip


def test_record_of_schema_1_0_2_names_the_group_by_an_address():
    inputs = json.dumps([[tensor(1, 4)], 12, 82149104, 0, "all_gather", [], [], 2])
    outputs = json.dumps([[[tensor(1, 4), tensor(1, 4)]]])
    facts = facts_of_record(None, inputs, '["GenericList[Tensor(float)]"]', outputs, {82149104: "0"})
    assert (facts.process_group, facts.in_bytes, facts.out_bytes, facts.seq) == ("0", 4, 8, 12)
    assert facts_of_record(None, inputs, "[]", outputs, {}).process_group is None


def test_record_of_schema_1_0_1_has_its_tensor_plain_and_the_wait_none():
    inputs = json.dumps([tensor(6144, 4), 147, 94594108284448, 0, "all_to_allv", [768] * 8, [768] * 8])
    facts = facts_of_record(None, inputs, '["Tensor(float)"]', json.dumps([tensor(6144, 4)]), {})
    assert (facts.collective, facts.in_bytes, facts.out_bytes, facts.seq) == ("all_to_all", 24576, 24576, 147)
    wait = facts_of_record(None, json.dumps([147, 0, 0, "wait", [], []]), "[]", "[]", {})
    assert (wait.collective, wait.seq) == (None, 147)


def test_sequence_number_of_later_torch_says_whether_it_is_of_point_to_point():
    inputs = json.dumps([[tensor(1, 4)], [34, False], ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, 2])
    assert facts_of_record(None, inputs, "[]", "[]", {}).seq == 34


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("c10d::allreduce_", [[tensor(5, 2), tensor(3, 2)], "<Object>"], {"in_bytes": 16, "out_bytes": 16}),
        ("c10d::_allgather_base_", [tensor(8, 4), tensor(2, 4), "<Object>"], {"in_bytes": 8, "out_bytes": 32}),
        ("c10d::_reduce_scatter_base_", [tensor(2, 4), tensor(8, 4)], {"in_bytes": 32, "out_bytes": 8}),
        ("c10d::allgather_", [[[tensor(5, 8)] * 3], [tensor(5, 8)]], {"in_bytes": 40, "out_bytes": 120}),
        ("c10d::broadcast_", [[tensor(5, 8)], "<Object>", 2, 0], {"in_bytes": 40, "out_bytes": 40, "group_root": 2}),
        ("c10d::reduce_", [[tensor(5, 8)], "o", "o", 3, 0], {"in_bytes": 40, "out_bytes": 40, "group_root": 3}),
        ("c10d::gather_", [[], [tensor(9, 4)], "<Object>", 0], {"in_bytes": 36, "out_bytes": 0, "group_root": 0}),
        ("c10d::scatter_", [[tensor(4, 4)], [], "<Object>", 1], {"in_bytes": 0, "out_bytes": 16, "group_root": 1}),
        ("c10d::alltoall_base_", [tensor(4, 4), tensor(10, 4)], {"in_bytes": 40, "out_bytes": 16}),
        ("c10d::send", [[tensor(19, 4)], "<Object>", 2, 7], {"in_bytes": 76, "group_peer": 2, "tag": 7}),
        ("c10d::recv_", [[tensor(19, 4)], "<Object>", 3, 7], {"out_bytes": 76, "group_peer": 3, "tag": 7}),
        ("c10d::recv_any_source_", [[tensor(3, 4)], "<Object>", 5], {"in_bytes": 12, "out_bytes": 12, "tag": 5}),
        ("gloo:all_gather", [tensor(6, 4)], {"in_bytes": 24}),
        ("c10d::allreduce_", [["<None>"]], {}),
    ],
)
def test_ops_of_c10d_say_sizes_by_position(name, inputs, expected):
    assert given_facts(facts_of_op(name, json.dumps(inputs), "[]")) == expected


def test_shapes_of_the_device_trace_do_where_it_writes_element_types():
    dims, types = json.dumps([[2632], [658], [], []]), json.dumps(["float", "float", "", "Scalar"])
    facts = facts_of_dims("c10d::_allgather_base_", dims, types, ())
    assert (facts.in_bytes, facts.out_bytes, facts.dtype) == (2632, 10528, "float32")
    # Of a list of tensors it does not write the type.
    listed = facts_of_dims("c10d::broadcast_", "[[[7]], [], []]", '["TensorList", "", "Scalar"]', ["", "", "1"])
    assert (listed.in_bytes, listed.group_root) == (None, 1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("c10::BFloat16", "bfloat16"), ("Tensor(long int)", "int64"), ("Float", "float32"), ("Byte", "uint8"),
        ("unsigned char", "uint8"), ("c10::Float8_e4m3fn", "float8_e4m3fn"), ("c10::complex<float>", "complex64"),
        ("Widget", None), (None, None),
    ],
)  # fmt: skip
def test_element_types_have_torchs_names(text, name):
    assert dtype_name(text) == name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, JSON, st.sampled_from(["c10d::allreduce_", "c10d::gather_", "c10d::send", "gloo:send", "x"]))
def test_no_argument_makes_it_fail_or_give_an_impossible_number(values, types, name):
    inputs, kinds = json.dumps(values), json.dumps(types)
    found = [
        facts_of_op(name, inputs, kinds), facts_of_dims(name, inputs, kinds, ()),
        facts_of_record(kinds, inputs, kinds, inputs, {}), facts_of_args(inputs),
        facts_of_args(json.dumps({"Collective name": "send", "In msg nelems": 5, "dtype": values})),
    ]  # fmt: skip
    for facts in found:
        for number in (facts.in_bytes, facts.out_bytes, facts.seq, facts.peer, facts.group_root, facts.tag):
            assert number is None or 0 <= number < 2**53


def test_what_states_no_collective_says_nothing():
    assert facts_of_args(None) == facts_of_args('{"stream": 7}') == facts_of_args("{") == NOTHING
