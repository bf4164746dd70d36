"""Ctrl-C or SIGTERM at any line of the code that ends a recording: nothing keeps running, what is whole is kept."""

import pytest

from recording.scripts import run_script

# One process per group; it interrupts each line of these functions once, then records once more. SIGTERM comes with a
# handler of the job's own, after which training goes on.
GROUPS = {
    "stop": ["Recorder.stop", "Recorder.leave_step", "Cycles.finish", "Cycles.leave", "HostObserver.stop"],
    "profiler": ["DeviceProfiler.stop", "DeviceProfiler.export", "_KinetoProfile.stop_trace", "profile.__exit__"],
    "settle": ["Recorder.settle", "Recorder._end_observer", "HostObserver.unregister", "Disk.do"],
    "close": ["Session.close", "Session._close", "Session._guarded", "Cycles.settle", "remove_session"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_interrupt_at_every_line(tmp_path, group):
    run_script(
        tmp_path,
        f"""
        import json
        from chakra_capture.recording import device_profiler, observer
        device_profiler._is_one_warming_up = lambda: False  # There is none, and looking for it takes long.
        observer.SETTLE_NS = 1_000_000  # No other thread computes here.
        logging.disable(logging.CRITICAL)
        targets = {GROUPS[group]!r}
        is_sigterm = False
        places = ("chakra_capture/recording/", "torch/profiler/profiler.py", "torch/autograd/profiler.py")

        def attempt(number, where, seen, hit):
            def trace(frame, event, argument):
                code = frame.f_code
                if code.co_qualname not in targets or not any(place in code.co_filename for place in places):
                    return None

                def line(frame, event, argument):
                    here = (code.co_qualname, frame.f_lineno)
                    if event == "line":
                        seen.add(here)
                        if here == where and not hit:
                            hit.append(here)
                            if is_sigterm:
                                os.kill(os.getpid(), signal.SIGTERM)
                            else:
                                raise KeyboardInterrupt
                    return line

                return line

            interrupted = False
            try:
                with capture(settings(folder / str(number), 1, 2)) as session:
                    sys.settrace(trace)
                    train(session, 4)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(None)
            return interrupted

        seen = set()
        attempt(0, None, seen, [])
        assert {{name for name, _ in seen}} == set(targets)
        handled = []
        own = lambda *_: handled.append(1)
        cases = [(where, False) for where in sorted(seen)]
        cases += [(where, True) for where in sorted(seen)]
        for number, (where, is_sigterm) in enumerate(cases, 1):
            hit = []
            if is_sigterm:
                signal.signal(signal.SIGTERM, own)
            assert attempt(number, where, set(), hit) == (bool(hit) and not is_sigterm), where
            if is_sigterm:
                assert len(handled) == len(hit), where
                handled.clear()
                said = read(folder / str(number) / "0_run/rank-0.json")
                assert said["faults"] == [], where
                assert all(window["device_trace"] for window in said["windows"]), where
                assert signal.getsignal(signal.SIGTERM) is own, where
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if not registry.is_idle():
                registry._close_all()
            assert not autograd._is_profiler_enabled and registry.is_idle(), where
            for path in (folder / str(number)).rglob("*.json"):
                json.loads(path.read_bytes())
        with capture(settings(folder / "last", 1, 2)) as session:
            train(session, 4)
        assert read(folder / "last/0_run/rank-0.json")["complete"]
        """,
    )
