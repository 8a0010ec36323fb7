"""Megatron-Bridge on a machine without TransformerEngine, which parts of it import all the same."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock, patch

from megatron.core.extensions.transformer_engine import HAVE_TE
from packaging.version import Version

_NAMES = ("transformer_engine", "transformer_engine.pytorch")
# Bridge imports the second when it makes a provider.
_NEED_IT = ("megatron.bridge", "megatron.core.models.hybrid.hybrid_layer_specs")
# Which looks for TransformerEngine's classes among those of a model.
_PEFT = "megatron.bridge.peft.utils"


def import_bridge() -> None:
    """Import Megatron-Bridge; Megatron-Core knows already whether TransformerEngine is there."""
    if HAVE_TE:
        importlib.import_module("megatron.bridge")
        return
    modules = {}
    for name in _NAMES:
        modules[name] = MagicMock(name=name, __spec__=ModuleSpec(name, None), __path__=[])
    version = patch("megatron.core.utils._te_version", Version("2.9.0"))
    before = {name: sys.modules.get(name) for name in _NAMES}
    sys.modules.update(modules)
    try:
        with version:
            for name in _NEED_IT:
                importlib.import_module(name)
            importlib.import_module(_PEFT).HAVE_TE = False
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
