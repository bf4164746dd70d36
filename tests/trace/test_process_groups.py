"""Process groups as the traces of different versions state them."""

import json

import pytest

from chakra_capture.trace.process_groups import (
    ProcessGroup,
    by_name,
    groups_in_config,
    groups_in_init,
    mesh_dimension,
    ranks_in_text,
)


def test_an_empty_list_of_ranks_means_all_of_them():
    text = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "x", "ranks": [], "group_size": 3}])
    assert groups_in_init(text) == ([ProcessGroup("0", "default_pg", (0, 1, 2), 3)], {})


def test_schema_1_0_2_names_groups_by_an_address_too():
    text = json.dumps([{"pg_name": "0", "backend_id": 82149104, "ranks": [1, 3], "group_size": 2}])
    assert groups_in_init(text) == ([ProcessGroup("0", None, (1, 3), 2)], {82149104: "0"})


def test_config_of_a_device_trace_lists_members_as_numbers_or_text():
    raw = json.dumps(
        [
            {"pg_name": "0", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [2, 3]},
            {"pg_name": 7, "pg_desc": "", "pg_size": 2, "ranks": "[0, 1]"},
            {"nonsense": 1},
        ]
    ).encode()
    assert groups_in_config(raw) == [ProcessGroup("0", "mesh_tp", (2, 3), 2), ProcessGroup("7", None, (0, 1), 2)]


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1, null]", b'"x"', b"[" * 3000, b'[{"pg_name": "0", "ranks": [-1]}]'])
def test_hostile_config_names_no_members(raw):
    assert [group for group in groups_in_config(raw) if group.ranks] == []
    assert groups_in_init(raw.decode())[0] == [] or groups_in_init(raw.decode())[0][0].ranks is None


def test_absurd_group_size_is_not_made_into_a_list():
    assert groups_in_init('[{"pg_name": "0", "ranks": [], "group_size": 99999999999}]')[0][0].ranks is None


@pytest.mark.parametrize(
    ("description", "dimension"),
    [
        ("mesh_dp", "dp"), ("mesh_dp_cp", "dp_cp"), ("default_pg", None), ("undefined", None), (None, None),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"), ("EXPERT_MODEL_PARALLEL_GROUP", "ep"), ("mesh_", None),
    ],
)  # fmt: skip
def test_description_names_the_dimension_of_a_mesh(description, dimension):
    assert mesh_dimension(description) == dimension


def test_a_list_of_ranks_that_was_cut_is_no_list():
    assert ranks_in_text("[0, 1, 2]") == [0, 1, 2]
    assert ranks_in_text("[0, 1, ..., 299]") is None
    assert ranks_in_text("") is None


def test_sources_complete_each_other():
    first = [ProcessGroup("0", None, None, 4)]
    second = [ProcessGroup("0", "default_pg", (0, 1, 2, 3)), ProcessGroup("1", "pair", (0, 1), 2)]
    assert by_name(first, second) == {
        "0": ProcessGroup("0", "default_pg", (0, 1, 2, 3), 4),
        "1": ProcessGroup("1", "pair", (0, 1), 2),
    }
