"""Check and correct gradient accumulation and data-parallel averaging in Lightning and Accelerate runs.

``from accum_plugin.lightning import AccumulationCallback`` for a Lightning ``Trainer``,
``from accum_plugin.accelerate import AccumulationHook`` for an Accelerate loop. The names here load on first use,
so that ``import accum_plugin`` imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accum_plugin.equivalence import check_equivalence
    from accum_plugin.finding import Finding
    from accum_plugin.record import WindowRecord

__version__ = "0.1.0"
__all__ = ["Finding", "WindowRecord", "__version__", "check_equivalence"]

_HOMES = {
    "Finding": "accum_plugin.finding",
    "WindowRecord": "accum_plugin.record",
    "check_equivalence": "accum_plugin.equivalence",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module the first time it is asked for.

    Raises:
        AttributeError: If the package exports no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the module's names, those not loaded yet included."""
    return sorted({*globals(), *__all__})
