"""What a process is told of whether it can be recorded: problems planted for real, and none where all is well."""

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from disks import READ_ONLY, full_disk

import chakra_capture
from chakra_capture.recording.checkup import Check, Level, installed, machine
from chakra_capture.recording.checkup.trial import judged
from recording.scripts import run_script

ROOT = Path(chakra_capture.__file__).parents[1]
NO_DUMPS = {"TORCH_FR_DUMP_TEMP_FILE": "/dev/null/none"}


def problems(found) -> list[Check]:
    return [check for check in found if check.level is not Level.ok]


def only(found) -> Check:
    (problem,) = problems(found)
    assert all(part for part in (problem.what, problem.todo))
    return problem


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("CHAKRA_CAPTURE_DISABLED", "1", Level.cannot_record),
        ("ENABLE_PYTORCH_EXECUTION_TRACE", "1", Level.cannot_record),
        ("KINETO_USE_DAEMON", "1", Level.cannot_record),
        ("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE", "1", Level.warning),
        ("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA", "aten::embedding", Level.warning),
        ("KINETO_CONFIG", "/etc/kineto.conf", Level.warning),
    ],
)
def test_variable_that_is_in_the_way_is_named(variable, value, level):
    found = only(machine.environment({variable: value}))
    assert (found.subject, found.level) == ("environment", level)
    assert variable in found.what
    assert problems(machine.environment({variable: ""})) == []


def test_nsight_around_the_process_is_named(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    found = only(machine.environment({}))
    assert (found.level, "NSYS_PROFILING_SESSION_ID" in found.what) == (Level.cannot_record, True)


def test_folder_that_refuses_a_file_is_named_and_nothing_is_left(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for folder in (READ_ONLY, in_the_way, in_the_way / "below"):
        found = only(machine.folder(str(folder)))
        assert (found.subject, found.level) == ("trace_dir", Level.cannot_record)
        assert str(folder) in found.what
    with full_disk(tmp_path / "full"):
        found = only(machine.folder(str(tmp_path / "full" / "traces")))
        assert found.level is Level.cannot_record
        assert "No space left on device" in found.what or "File too large" in found.what
        assert list((tmp_path / "full").iterdir()) == []
    assert "control characters" in only(machine.folder("a\nb")).what
    with_break = tmp_path / "file" / "a\u2028b"
    assert "a\ufffdb cannot be written" in str(only(machine.folder(str(with_break))))


def test_little_space_is_a_warning(tmp_path):
    assert machine.space(tmp_path, 2_000_000_000).level is Level.ok
    found = machine.space(tmp_path, 90_000_000)
    assert (found.level, "90 MB free" in found.what) == (Level.warning, True)


class _Bomb:
    def __reduce__(self):
        return os._exit, (7,)


def test_dumps_of_the_flight_recorder_are_named_and_not_opened(tmp_path):
    prefix = tmp_path / "torch" / "comm_lib_trace_rank_"
    prefix.parent.mkdir()
    for rank in (10, 2, 0, 1, 3):
        Path(f"{prefix}{rank}").write_bytes(pickle.dumps(_Bomb()))
    Path(f"{prefix}2.pipe").write_text("")  # of the recorder, too, but no dump

    by_default = only(machine.nccl_dumps({"XDG_CACHE_HOME": str(tmp_path)}))
    given = only(machine.nccl_dumps({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix)}))

    assert by_default.level is Level.warning
    assert given.what == by_default.what
    named = ", ".join(f"{prefix}{rank}" for rank in (0, 1, 2, 3))
    assert given.what == f"The flight recorder has left {named} and 1 more."
    assert problems(machine.nccl_dumps({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "other_")})) == []


def test_framework_whose_module_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ignite", None)  # as where it was removed by hand

    found = problems(installed.installed("monai"))

    assert [(check.level, check.what.split()[0]) for check in found] == [
        (Level.warning, "pytorch-ignite"),
        (Level.cannot_record, "monai"),
    ]
    assert 'pip install "chakra-capture[monai]"' in found[1].todo


def test_version_below_what_is_asked_for_is_older():
    part = installed.Part("numpy", "numpy")
    version = installed._version(part)
    assert version is not None
    assert not installed._is_too_old(part, {"numpy": version})
    assert not installed._is_too_old(part, {"numpy": "1.9"})
    assert installed._is_too_old(part, {"numpy": "1000.1"})
    assert {"torch", "monai", "hydra-core"} <= set(installed._lower_bounds())


def test_python_without_torch_and_frameworks_is_told_which_to_install(tmp_path):
    command = [sys.executable, "-S", "-P", "-m", "chakra_capture.recording.checkup", str(tmp_path), "lightning"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), **NO_DUMPS}, timeout=60
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line["check"] for line in lines if "check" in line and line["check"]["level"] == "cannot record"]
    assert [(check["subject"], check["what"]) for check in found] == [
        ("frameworks", "torch is not installed."),
        ("frameworks", "pytorch-lightning is not installed."),
        ("torch", "torch cannot be imported: No module named 'torch'."),
    ], done.stderr
    assert lines[-1] == {"is_done": True}


def test_what_a_job_has_in_its_process_is_named_there_and_gone_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "none_"))
    run_script(
        tmp_path,
        """
        import ctypes, multiprocessing
        from chakra_capture.recording.checkup import Level, checks, machine, process
        from chakra_capture.recording.checkup.trial import trial

        class Net(torch.nn.Linear):
            pass

        def named(*looked):
            return " ".join(str(check) for look in looked for check in look() if check.level is not Level.ok)

        def on_usr2(*_):
            pass

        well = checks(str(folder / "to" / "traces"))
        assert [str(check) for check in well if check.level is not Level.ok] == []
        assert [check.subject for check in well] == [
            "environment", "trace_dir", "frameworks", "NCCL dumps", "torch", "profilers", "forks", "compiled modules",
            "signals",
        ]
        assert list(folder.iterdir()) == []

        theirs = profile(activities=[ProfilerActivity.CPU])
        theirs.start()
        assert "Another torch profiler is running in this process" in named(process.profilers)
        (failed,) = trial(folder)
        assert failed.level is Level.cannot_record, failed
        assert "another torch profiler is running in this process" in failed.why, failed
        theirs.stop()
        (made,) = trial(folder / "to" / "traces")
        assert (made.level, made.what[:24]) == (Level.ok, "one step in both traces:"), made
        assert list(folder.iterdir()) == []

        observer = ExecutionTraceObserver()
        observer.register_callback(str(folder / "theirs.json"))
        assert "ExecutionTraceObserver is registered" in named(process.profilers)
        observer.unregister_callback()

        signal.signal(signal.SIGUSR2, on_usr2)
        assert "SIGUSR2 is taken: __main__.on_usr2 handles it" in named(machine.signals)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        ctypes.CDLL(None).signal(int(signal.SIGUSR2), ctypes.CDLL(None).abs)
        assert "SIGUSR2 is taken: code in C handles it" in named(machine.signals)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert "SIGTERM: it is ignored" in named(machine.signals)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        net, other = torch.compile(Net(2, 2)), torch.nn.ReLU()
        other.compile()
        assert "torch.compile has Net, ReLU." in named(process.compiled_modules)
        del net, other

        import polars
        assert "polars is loaded, and workers are forked" in named(process.forks)
        multiprocessing.set_start_method("spawn")
        everything = (process.profilers, process.forks, process.compiled_modules, machine.signals)
        assert named(*everything) == ""
        with capture(settings(folder, 0, 0)) as session, session.step(0):
            work()
            assert named(*everything) == ""  # our own profiler, observer and SIGTERM handler
        """,
    )


def test_device_trace_without_kernels_cannot_be_what_a_device_is_recorded_with():
    assert judged(Counter(cpu_op=5), None).level is Level.ok
    assert judged(Counter(cpu_op=5, kernel=2), "cuda:0").what == "one step in both traces: 5 ops, 2 kernels on cuda:0"
    assert judged(Counter(cpu_op=5), "cuda:0").level is Level.cannot_record
    assert judged(Counter(), None).level is Level.cannot_record
