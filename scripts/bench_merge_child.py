"""One measured process of bench_merge.py: bench_merge_child.py WORK HOST DEVICE OUT.

Runs under the Python that has what it measures, so nothing but the standard library is imported at the top. What it
has to say goes to standard output as one line of JSON, the last one.
"""

import contextlib
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

# Stage of each function of the merge, under the name it is called by. Time is that of the innermost one, so what a
# function of another stage does inside does not count twice.
STAGES = {
    "reading host": ("merge.rank.read_host_trace",),
    "reading device": ("merge.rank.read_device_trace",),
    "linking": (
        "merge.rank.link_host_ops",
        "merge.rank.link_by_order",
        "merge.tables.link_launches",
        "merge.tables._nest_cpu",
        "merge.tables._device_parents",
    ),
    "rows and their order": ("merge.rank.add_roots", "merge.rank.link_rows"),
    "edges": ("merge.rank.find_edges",),
    "steps and link.json": ("merge.rank.steps_table", "merge.rank._entry"),
    "writing": ("merge.rank.write_nodes", "merge.rank.write_table", "merge.rank.write_link"),
}


def json_load(host: Path, device: Path, out: Path) -> dict[str, Any]:
    for path in (host, device):
        with path.open("rb") as file:
            json.load(file)
    return {}


def merge(host: Path, device: Path, out: Path, *, scanner: str) -> dict[str, Any]:
    """The command as a user runs it, but for the scanner, which it has no flag for."""
    prepare()
    from chakra_capture.cli import main
    from chakra_capture.merge import report
    from chakra_capture.trace.scanners import ScannerKind

    report.MergeOptions = partial(report.MergeOptions, scanner=ScannerKind(scanner))  # type: ignore[misc, assignment]
    arguments = ["merge", "--host", str(host), "--device", str(device), "--rank", "0", "-o", str(out), "--force"]
    try:
        main.main(arguments)
    except SystemExit as end:
        if end.code:
            raise
    link = json.loads((out / "rank=0" / "link.json").read_text())["windows"][0]
    used = {link["host"]["scanner"], link["device"]["scanner"]}
    if used != {scanner}:
        raise SystemExit(f"asked for the {scanner} scanner, link.json says {sorted(used)}")
    return {}


def prepare() -> None:
    """What the command does first in a process of its own, before it imports numpy and polars."""
    from chakra_capture.merge.memory import prepare_process

    prepare_process(merges=True)


def stages(host: Path, device: Path, out: Path, *, scanner: str) -> dict[str, Any]:
    """A merge with a clock around the functions of each stage; CPU seconds per stage."""
    prepare()
    clock = StageClock()
    for stage, names in STAGES.items():
        for name in names:
            clock.watch(stage, name)
    start = time.process_time()
    merge(host, device, out, scanner=scanner)
    end = time.process_time()
    other = end - start - sum(clock.seconds.values())
    return {"stages": {**clock.seconds, "the rest": other, "start-up": start}}


class StageClock:
    """CPU time of watched functions, less that of watched functions inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = threading.local()

    def watch(self, stage: str, name: str) -> None:
        """Put a clock around a function of chakra_capture; one that is gone is an error, not a stage of 0 s."""
        module_name, _, function_name = name.rpartition(".")
        module = importlib.import_module(f"chakra_capture.{module_name}")
        function = getattr(module, function_name, None)
        if function is None:
            raise SystemExit(f"chakra_capture.{name} is gone: give its successor a stage in {Path(__file__).name}")
        self.seconds.setdefault(stage, 0.0)
        setattr(module, function_name, self._clocked(stage, function))

    def _clocked(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            with self._time(stage):
                return function(*args, **kwargs)

        return clocked

    @contextlib.contextmanager
    def _time(self, stage: str) -> Iterator[None]:
        # Polars works in threads of its own, which only the clock of the process sees; beside the main thread that
        # clock would count what the main thread does meanwhile.
        clock = time.process_time if threading.current_thread() is threading.main_thread() else time.thread_time
        outer: list[float] = getattr(self._inside, "stack", [])
        self._inside.stack = [*outer, 0.0]
        start = clock()
        try:
            yield
        finally:
            spent = clock() - start
            self.seconds[stage] += spent - self._inside.stack[-1]
            self._inside.stack = outer
            if outer:
                outer[-1] += spent


def hta(host: Path, device: Path, out: Path) -> dict[str, Any]:
    """HTA reads the device trace into a data frame; it knows no host trace."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(sys.stderr):
        analysis = TraceAnalysis(trace_files={0: str(device.resolve())}, trace_dir=str(device.resolve().parent))
    if not len(analysis.t.traces[0]):
        raise SystemExit("HTA read no event")
    return {}


def trace_link(host: Path, device: Path, out: Path) -> dict[str, Any]:
    """mlc-chakra links both traces into one JSON file.

    It needs PARAM's et_replay, which no package index has by itself; the wheel of HolisticTraceAnalysis 0.5, which
    mlc-chakra installs, carries it inside param_bench.
    """
    with contextlib.suppress(ImportError):
        import param_bench  # type: ignore[import-not-found]

        sys.path.extend(param_bench.__path__)
    from chakra.src.trace_link.trace_linker import TraceLinker  # type: ignore[import-not-found]

    out.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr):
        TraceLinker().link(0, str(host), str(device), str(out / "linked.json"))
    return {}


WORK: dict[str, Callable[[Path, Path, Path], dict[str, Any]]] = {
    "json.load": json_load,
    "native": partial(merge, scanner="native"),
    "msgspec": partial(merge, scanner="msgspec"),
    "stages": partial(stages, scanner="native"),
    "hta": hta,
    "trace_link": trace_link,
}


def main(arguments: list[str]) -> int:
    work, host, device, out = arguments
    said = WORK[work](Path(host), Path(device), Path(out))
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
