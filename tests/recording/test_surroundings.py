"""What the manifest says of the process beside its windows."""

from chakra_capture import capture
from recording.loops import train
from recording.recorded import manifest, settings
from recording.scripts import run_script


def test_process_groups_carry_the_dimensions_of_their_meshes(tmp_path):
    run_script(
        tmp_path,
        """
        from torch.distributed import init_process_group, new_group
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from chakra_capture.recording.surroundings import surroundings
        init_process_group("fake", store=FakeStore(), rank=1, world_size=4)  # four ranks in one process
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plain = init_device_mesh("cpu", (4,))
        own = new_group([1, 3], group_desc="mine")
        world, dp, tp, mine = surroundings().process_groups

        def dimensions(group):
            return [(found.name, found.mesh) for found in group.mesh_dimensions]

        assert (world.size, world.ranks, dimensions(world)) == (4, None, [("dim_0", ["dim_0"])]), world
        assert (dp.ranks, dimensions(dp)) == ([1, 3], [("dp", ["dp", "tp"])]), dp
        assert (tp.ranks, dimensions(tp)) == ([0, 1], [("tp", ["dp", "tp"])]), tp
        assert (mine.ranks, mine.description, dimensions(mine)) == ([1, 3], "mine", []), mine
        torch.distributed.destroy_process_group()
        """,
    )


def test_manifest_names_versions_options_and_clocks(tmp_path):
    with capture(settings(tmp_path, 1, 4, warmup_steps=1, with_stack=True)) as session:
        train(session, 6)

    said = manifest(tmp_path)
    assert set(said["versions"]) == {"python", "chakra_capture", "torch", "cuda", "hip", "cudnn", "driver"}
    assert said["options"] == {
        "activities": ["CPU"],
        "options": ["record_shapes", "with_stack", "profile_all_threads", "enable_cuda_sync_events"],
    }
    assert said["surroundings"] == {"devices": [], "nccl": None, "process_groups": []}
    anchors = [said["opened"], *(a for w in said["windows"] for a in (w["started"], w["ended"])), said["written"]]
    for clock in ("unix_ns", "monotonic_ns"):
        times = [anchor[clock] for anchor in anchors]
        assert times == sorted(times)
        assert len(times) == 6
