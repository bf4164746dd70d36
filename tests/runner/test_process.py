"""``chakra-capture run``: for a script nothing is different, and of what cannot be recorded there is a sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

from runner.test_steps_found import JOBS, recorded, steps_of

# What a script can see of how it was started.
SEEN = """
import json, os, sys
import __main__
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "main": __main__.__file__, "first": sys.path[0],
    "cwd": os.getcwd(), "stdin": sys.stdin.read(), "doc": __doc__, "package": __package__, "is_debug": __debug__,
    "parent": os.getppid(), "names": sorted(vars(__main__)), "cached": __cached__,
    "spec": getattr(__spec__, "name", None), "loaded": "rich" in sys.modules,
}))
"""


def seen(command: list[object], folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [*map(str, command)], cwd=folder, input="typed\n", capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("flags", [[], ["-O"], ["-P", "-u"]])
@pytest.mark.parametrize("how", ["script", "module", "program"])
def test_a_script_sees_what_it_would_see_without_us(tmp_path, monkeypatch, flags, how):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(f'"""What it is."""\n{SEEN}')
    program = folder / "train-it"
    program.write_text(f"#!{sys.executable}\n{SEEN}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")  # -P leaves nothing else
    # Python prepends the folder of a program by its path; so does ours.
    alone, ours = {
        "script": (["package/train.py"], ["package/train.py"]),
        "module": (["-m", "package.train"], ["-m", "package.train"]),
        "program": ([program], ["train-it"]),
    }[how]
    options = ["--help", "-m", "x y", "--"]
    with_us = [sys.executable, *flags, "-m", "chakra_capture", "run", "--start-step", "2", *ours, "--", *options]
    assert seen(with_us, tmp_path) == seen([sys.executable, *flags, *alone, *options], tmp_path)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('mine')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os._exit(5)", 5),
    ],
)
def test_a_training_ends_as_without_us_and_what_was_recorded_is_kept(tmp_path, ending, code):
    script = tmp_path / "train.py"
    script.write_text(f"import os, runpy, signal, sys\nsys.argv[1:] = ['plain']\nrunpy.run_path({str(JOBS)!r}, "
                      f"run_name='__main__')\n{ending}\n")  # fmt: skip
    done = recorded(tmp_path, "--start-step", "3", "--end-step", "4", script)
    assert done.returncode == code, done.stderr
    if code != 5:
        assert len(steps_of(tmp_path)) == 12
    if "mine" in ending:
        lines = done.stderr.splitlines()
        assert "ValueError: mine" in lines
        assert f'  File "{script}", line 4, in <module>' in lines
    if code != 5:
        manifest = json.loads(next(tmp_path.glob("traces/*_run/rank-0.json")).read_text())
        assert [window["steps"] for window in manifest["windows"]] == [[3, 4]]
        assert len(list(tmp_path.glob("traces/0_kineto/rank-0.json"))) == 1


def test_a_signal_for_the_command_reaches_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "open('ready', 'w').close()\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "chakra_capture", "run", script]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as running:
        while not (tmp_path / "ready").exists():
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGUSR1)
        assert running.wait(60) == 7


@pytest.mark.parametrize("body", ["print('hello')", "import torch\ntorch.ones(2).sum()", "DataLoader"])
def test_a_script_that_never_updates_leaves_a_sentence_and_no_folder(tmp_path, body):
    evaluates = "from torch.utils.data import DataLoader\nfor batch in DataLoader(range(9)): pass"
    (tmp_path / "script.py").write_text(evaluates if body == "DataLoader" else body)
    done = recorded(tmp_path, "script.py", is_started_anew=body != "DataLoader")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("chakra-capture: script.py made no optimizer step that could be seen")
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["nothing.py"], "nothing.py is no Python file, and no program of that name"),
        (["-m", "no.such.module"], "No module no.such.module can be run"),
        (["--with-stack", "perhaps", "x.py"], "chakra_profile.with_stack is the text 'perhaps'"),
        (["--start-step", "5", "--end-step", "3", "x.py"], "chakra_profile.end_step is 3 but"),
        (["cat"], "cat is no Python program"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(tmp_path, command, says):
    (tmp_path / "x.py").touch()
    done = recorded(tmp_path, *command)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("chakra-capture: ")
    assert says in line


def test_the_options_end_with_the_script_and_wrong_ones_are_wrong_usage(tmp_path):
    (tmp_path / "x.py").touch()
    assert recorded(tmp_path, "--nonsense", "1", "x.py").returncode == 2
    assert recorded(tmp_path, "--end-step", "3", "x.py").returncode == 2
    assert recorded(tmp_path).returncode == 2


def test_switched_off_by_the_environment_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
    done = recorded(tmp_path, JOBS, "plain")
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, "", [])


def test_a_script_that_records_by_itself_is_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path.insert(0, {str(JOBS.parent)!r})\nimport jobs, torch\n"
        "from chakra_capture import capture\n"
        "with capture({'enabled': True, 'start_step': None, 'trace_dir': 'own'}) as session:\n"
        "    for step, batch in session.steps(jobs.batches()):\n"
        "        pass\n"
        "    jobs.plain()\n"
    )
    done = recorded(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "traces").exists()
    assert len((tmp_path / "own/0_phases/rank-0.jsonl").read_text().splitlines()) > 6


def test_two_ranks_of_torchrun_are_one_run_and_merged_at_the_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(JOBS.parent)!r})\nimport jobs, torch\n"
        "torch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(jobs.network())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _, inputs, targets in jobs.batches():\n"
        "    optimizer.zero_grad()\n"
        "    torch.nn.functional.mse_loss(model(inputs), targets).backward()\n"
        "    optimizer.step()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "chakra_capture", "run"]
    options = ["--trace-dir", "traces", "--run-name", "two", "--start-step", "2", "--end-step", "3", "--merge"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The ranks are processes of their own.
    done = warm.run([sys.executable, *command, *options, script], cwd=tmp_path, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 ranks merged" in done.stderr
    for rank in range(2):
        found = steps_of(tmp_path, rank)
        assert [step["step"] for step in found] == list(range(6))
        assert "forward" in found[-1]["phases"]
        assert (tmp_path / f"traces/two_merged/rank={rank}/nodes.parquet").exists()


def test_further_ranks_that_lightning_starts_are_recorded_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(JOBS.parent)!r})\nimport jobs, torch\n"
        "import pytorch_lightning as pl\n"
        "class Module(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.network = jobs.network()\n"
        "    def training_step(self, batch, _):\n"
        "        return torch.nn.functional.mse_loss(self.network(batch[1]), batch[2])\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.01)\n"
        "assert sys.argv[1:] == ['--lr', '0.1']\n"
        "pl.Trainer(max_epochs=1, accelerator='cpu', devices=2, strategy='ddp', logger=False,\n"
        "           enable_checkpointing=False, enable_progress_bar=False).fit(Module(), jobs.batches())\n"
    )
    done = recorded(tmp_path, script, "--", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert [step["step"] for step in steps_of(tmp_path, rank)] == [0, 1, 2]


COMPILED = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
torch.manual_seed(0)
batches = DataLoader(torch.randn(6, 4), batch_size=2)

def train(how):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = torch.compile(model, backend="eager", fullgraph=True) if how == "network" else model
    loss_of = lambda batch: network(batch).square().mean()
    loss_of = torch.compile(loss_of, backend="eager", fullgraph=True) if how == "function" else loss_of
    update = torch.compile(optimizer.step, backend="eager") if how == "update" else optimizer.step

    def whole_step(batch):
        optimizer.zero_grad()
        loss_of(batch).backward()
        update()

    step = torch.compile(whole_step, backend="eager") if how == "whole" else whole_step
    for batch in batches:
        step(batch)
    return [parameter.sum().item() for parameter in model.parameters()]

for how in ("network", "function", "update", "whole"):
    weights = train(how)
    found = {name: sum(counters[name].values()) for name in ("stats", "graph_break", "frames")}
    print(json.dumps([how, weights, found]))
"""


def test_nothing_more_is_compiled_and_the_weights_are_the_same(tmp_path):
    (tmp_path / "train.py").write_text(COMPILED)
    # What compiles is to be imported after what we put in, which it would else not find.
    ours = recorded(tmp_path, "train.py", is_started_anew=True)
    assert ours.returncode == 0, ours.stderr
    alone = warm.run([sys.executable, "train.py"], cwd=tmp_path, timeout=240, check=True)
    lines = zip(ours.stdout.splitlines(), alone.stdout.splitlines(), strict=True)
    for (how, weights, found), (_, others, without) in ((json.loads(one), json.loads(other)) for one, other in lines):
        assert weights == others, how
        assert found["graph_break"] == without["graph_break"], how
        assert found["frames"] <= without["frames"], how
    # What is compiled whole, updates too, is not seen; three batches each of the other two are.
    assert len(steps_of(tmp_path)) >= 6


REPLACED = """
import copy, inspect, pickle
import torch
from torch.utils.data import DataLoader, dataloader

assert pickle.loads(pickle.dumps(torch.autograd.backward)) is torch.autograd.backward
print(pickle.dumps(torch.autograd.backward))
assert copy.deepcopy(torch.autograd.backward) is torch.autograd.backward
print(inspect.signature(torch.amp.GradScaler.step), torch.amp.GradScaler.step.__qualname__)
print(inspect.signature(torch.autograd.backward), dataloader._BaseDataLoaderIter.__next__.__qualname__)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(3, 1)):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_what_we_replace_looks_and_pickles_as_before_and_a_folder_that_refuses_is_said_once(tmp_path):
    (tmp_path / "train.py").write_text(REPLACED)
    (tmp_path / "traces").touch()  # no folder can be made there
    alone, ours = (
        warm.run([sys.executable, "train.py"], cwd=tmp_path, check=True),
        recorded(tmp_path, "train.py", is_started_anew=True),
    )
    assert (ours.returncode, ours.stdout) == (0, alone.stdout), ours.stderr
    assert "Recording stops on rank 0, training goes on" in ours.stderr
    assert "no optimizer step" not in ours.stderr
