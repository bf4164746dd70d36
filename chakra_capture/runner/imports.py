"""Something done right after a module is imported, whoever imports it and whenever."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(actions: dict[str, Action]) -> None:
    """Call an action with its module once that has been imported; of a module that is there already, now."""
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Watch(actions))


class _Watch(MetaPathFinder):
    """Finds nothing by itself: it has others find a module, and is told when it is there."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = actions
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._is_asking or fullname not in self._actions:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._actions.pop(fullname))
        return spec


class _Telling(Loader):
    """A loader that tells when it is done; in the module stands the loader it had."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
