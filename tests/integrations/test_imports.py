"""What importing an adapter brings into a process, and what it says where its framework is missing."""

import subprocess
import sys
import textwrap

import warm

FRAMEWORKS = ("pytorch_lightning", "lightning", "ignite", "monai", "transformers", "accelerate", "hydra")


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_with_torch(script: str) -> str:
    """The same with torch imported, which every framework brings anyhow."""
    done = warm.run([sys.executable, "-c", textwrap.dedent(script)], timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_imports_no_framework():
    found = run_python(f"""
        import sys
        import chakra_capture
        from chakra_capture import capture, ChakraProfileConfig
        print([name for name in {FRAMEWORKS} + ("torch",) if name in sys.modules])
    """)

    assert found == "[]\n"


def test_adapter_imports_its_framework_alone():
    # What the framework itself imports is its own affair: Lightning and MONAI import Transformers if it is there.
    found = run_with_torch(f"""
        import sys
        from importlib import import_module
        offline = ("polars", "msgspec", "cyclopts", "chakra_capture.merge", "chakra_capture.trace")
        for framework, adapters in (
            ("ignite.engine", ["ignite"]),
            ("transformers", ["huggingface"]),
            ("monai.engines", ["monai"]),
            ("pytorch_lightning", ["lightning"]),
        ):
            import_module(framework)
            before = set(sys.modules)
            for adapter in adapters:
                import_module("chakra_capture.integrations." + adapter)
            print([name for name in {FRAMEWORKS} + offline if name in sys.modules and name not in before])
    """)

    # accelerate comes with transformers.Trainer, which is imported when it is first named.
    assert found.splitlines() == ["[]", "['accelerate']", "[]", "[]"]


def test_missing_framework_is_one_sentence_that_names_the_extra():
    found = run_python("""
        import importlib.util
        importlib.util.find_spec = lambda name: None
        from chakra_capture.errors import MissingDependencyError
        for extra in ("ignite", "monai", "huggingface"):
            try:
                importlib.import_module(f"chakra_capture.integrations.{extra}")
            except MissingDependencyError as error:
                print(error)
    """)

    assert found.splitlines() == [
        f"chakra_capture.integrations.{extra} needs {framework}, which is not installed. "
        f'Run: pip install "chakra-capture[{extra}]"'
        for extra, framework in (
            ("ignite", "PyTorch-Ignite"),
            ("monai", "MONAI with PyTorch-Ignite"),
            ("huggingface", "Transformers with Accelerate"),
        )
    ]
