"""A script, module or program run as Python would run it, in a process that has begun as another one."""

import builtins
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from chakra_capture.errors import ScriptError


@dataclass(frozen=True, slots=True)
class Script:
    """What is to be run: its code, and how it finds itself."""

    code: CodeType
    name: str
    path: str
    import_folder: str
    spec: ModuleSpec | None

    def run(self, arguments: Sequence[str], *, is_path_safe: bool = False) -> None:
        """Run it as ``__main__``; what it raises is raised."""
        module = ModuleType("__main__")
        module.__file__, module.__spec__ = os.path.abspath(self.path), self.spec
        module.__builtins__ = builtins  # type: ignore[attr-defined]
        vars(module).update(__cached__=self.spec and self.spec.cached, __annotations__={})
        module.__package__ = self.spec.parent if self.spec is not None else None
        module.__loader__ = self.spec.loader if self.spec is not None else SourceFileLoader("__main__", self.path)
        sys.modules["__main__"] = module
        sys.argv[:] = [self.name, *arguments]
        if not is_path_safe:
            sys.path.insert(0, self.import_folder)
        exec(self.code, vars(module))


def find_script(target: str) -> Script:
    """Find a Python file, or a program of the PATH that is one (those of installed packages are).

    Raises:
        ScriptError: there is none, or it is no Python.
    """
    path = target if os.path.exists(target) else shutil.which(target)
    if path is None or os.path.isdir(path):
        raise ScriptError(
            f"{target} is no Python file, and no program of that name is on the PATH; expected a training script. "
            "Give its path, or -m MODULE."
        )
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    is_program = path is not target and not path.endswith(".py")
    if is_program and b"python" not in source[:200].split(b"\n", 1)[0]:
        raise ScriptError(
            f"{path} is no Python program; expected a script of an installed Python package, or a Python file. "
            "Give the Python file that trains."
        )
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as fault:
        if not isinstance(fault, SyntaxError):
            raise ScriptError(f"{path} is no Python file: {fault}. Give the Python file that trains.") from None
        raise
    return Script(code, path, path, os.path.dirname(os.path.realpath(path)), None)


def find_module(name: str, *, is_path_safe: bool = False) -> Script:
    """Find what ``python -m NAME`` would run, in the folder it is started in unless that is not safe.

    Raises:
        ScriptError: there is no such module, or it cannot be run.
    """
    if not is_path_safe:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    finally:
        if not is_path_safe:
            sys.path.remove(os.getcwd())
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or spec.origin is None or code is None:
        raise ScriptError(
            f"No module {name} can be run; expected what `python -m {name}` runs. Give an importable module, or the "
            "path of a script without -m."
        )
    return Script(code, spec.origin, spec.origin, os.getcwd(), spec)
