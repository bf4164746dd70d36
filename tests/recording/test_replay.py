"""Data for et_replay beside the host trace, under names that belong together."""

import logging
import os

import torch

from chakra_capture import capture
from recording.loops import work
from recording.recorded import check_pair, entries, files, manifest, settings


def look_up(session, num_steps, first=0):
    table = torch.nn.Embedding(10, 4)
    for step in range(first, num_steps):
        with session.step(step):
            work()
            table(torch.tensor([1, 2, 7]))


def test_integer_tensors_are_stored_for_replay(tmp_path, caplog):
    with capture(settings(tmp_path, 1, 2, replay_data=True, compress=True)) as session:
        look_up(session, 2)
        assert not [name for name in os.environ if name.startswith("ENABLE_PYTORCH_EXECUTION_TRACE")]
        look_up(session, 4, first=2)

    host = tmp_path / "0_chakra/rank-0.json.gz"
    nodes = [node for node in entries(host) if node["name"] == "aten::embedding"]
    attributes = [{a["name"]: a["value"] for a in node["attrs"]} for node in nodes]
    assert [a["tensor_range"] for a in attributes] == ['{"1":[1,7]}'] * len(nodes)
    stored = [name for name in files(tmp_path / "0_chakra") if name.startswith("rank-0_resources/")]
    nodes += [node for node in entries(host) if node["name"] == "aten::index_select"]
    assert sorted(stored) == sorted(f"rank-0_resources/nid_{node['id']}_tid_1.dat" for node in nodes)
    data = (tmp_path / "0_chakra" / stored[0]).read_bytes()
    assert torch.frombuffer(bytearray(data), dtype=torch.int64).tolist() == [1, 2, 7]
    assert manifest(tmp_path)["windows"][0]["resources"] == "0_chakra/rank-0_resources"
    assert not [name for name in os.listdir(tmp_path / "0_chakra") if "part" in name]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert ["values of integer tensors" in said for said in warnings].count(True) == 1


def test_each_cycle_has_its_own_data_and_a_variable_of_the_job_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA", "aten::mm")
    with capture(settings(tmp_path, 1, 4, warmup_steps=1, replay_data=True)) as session:
        look_up(session, 6)

    check_pair(tmp_path, [2])
    check_pair(tmp_path, [4], cycle=1)
    # The job asks for an operator without integers: nothing to store.
    assert files(tmp_path / "0_chakra") == ["rank-0.cycle-1.json", "rank-0.json"]
    assert os.environ["ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA"] == "aten::mm"


def test_training_that_ends_while_warming_up_leaves_no_folder(tmp_path):
    with capture(settings(tmp_path, 1, 4, warmup_steps=3, replay_data=True)) as session:
        look_up(session, 3)

    assert os.listdir(tmp_path / "0_chakra") == []
