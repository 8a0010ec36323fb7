"""Names of ``absorbed_mla.serving`` under which the engine was known before.

``engine``, ``options`` and ``sampling`` are importable from here as ever.
"""

from __future__ import annotations

import importlib
import sys

_MODULES = {
    "engine": "engine",
    "options": "engine_options",
    "sampling": "sampling.parameters",
}

for _name, _place in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"absorbed_mla.serving.{_place}")
