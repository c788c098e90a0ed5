"""Do something to a module when its import has finished, also if that import is under way now."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class _Visit(NamedTuple):
    """What to do: ``action`` (``"module:function"``), once the module has ``attribute``."""

    attribute: str
    action: str


class _Watcher:
    """A finder that finds nothing of its own and learns from every import that is looked up.

    A module not imported yet gets its visit when its loader has run it. One that is half imported already has a loader
    at work that cannot be followed any more; its visit comes at the next import after the attribute is there.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, _Visit] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders give a module waited for, its loader followed; else ``None``."""
        # An import hook that stays behind costs every later import this one look at an empty dictionary.
        if not self.waiting:
            return None
        self.visit_finished()
        if name not in self.waiting:
            return None
        spec = self._find_elsewhere(name, path, target)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, name)
        return spec

    def visit_finished(self) -> None:
        """Visit the modules waited for that have come to define their attribute."""
        for name, visit in list(self.waiting.items()):
            module = sys.modules.get(name)
            if module is not None and visit.attribute in vars(module):
                self._visit(name)

    def _find_elsewhere(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return spec
        return None

    def _follow(self, loader: Loader, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._visit(name)

        # On the instance: the module keeps its loader, and with it its source, resources and pickling.
        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _visit(self, name: str) -> None:
        # Taken off first: the action may import more, and comes back here.
        visit = self.waiting.pop(name, None)
        if visit is None:
            return
        try:
            home, _, function = visit.action.partition(":")
            getattr(importlib.import_module(home), function)(sys.modules[name])
        except Exception as error:
            print(f"accum_plugin: {name} could not be prepared, the flag is off: {error!r}", file=sys.stderr)


_WATCHER = _Watcher()


def when_imported(name: str, attribute: str, action: str) -> None:
    """Call ``action`` with module ``name`` once that is imported; at once where it already is.

    An action that raises is reported on standard error and breaks no import.

    Args:
        name: Full name of the module.
        attribute: A name that the module defines near its end: it is there when the import is as good as over.
        action: ``"module:function"``, itself imported only then.
    """
    _WATCHER.waiting[name] = _Visit(attribute, action)
    _WATCHER.visit_finished()
    if _WATCHER.waiting and _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)
