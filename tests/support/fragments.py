"""Whether Python of the pages could work: it compiles, and what it imports and calls exists."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType

# Calls whose keywords are compared, where a page does not import their names itself.
KNOWN = {
    "AbsorbedMLAOptions": "absorbed_mla",
    "EngineOptions": "absorbed_mla.serving.engine_options",
    "LLM": "absorbed_mla",
    "SamplingParams": "absorbed_mla",
    "MLATransformerConfig": "megatron.core.transformer",
    "OptimizerConfig": "megatron.core.optimizer",
    "hf_weights": "absorbed_mla.export",
    "get_absorbed_mla_decoder_block_spec": "specs.absorbed_mla_layer_specs",
    "get_absorbed_mla_hybrid_stack_spec": "specs.absorbed_mla_hybrid_specs",
}
# Packages whose names must exist wherever the tests run.
CHECKED = ("absorbed_mla", "specs", "checkpoint_conversion", "megatron")


def require_fragment(code: str) -> None:
    """Fail unless ``code`` compiles, and what it imports and calls is there."""
    tree = ast.parse(code)
    compile(code, "page", "exec")
    names = dict(KNOWN)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in CHECKED:
            module = _module(node.module)
            if module is None:
                continue
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
                names[name.name] = node.module
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in CHECKED:
                    importlib.import_module(name.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            called = getattr(importlib.import_module(names[node.func.id]), node.func.id)
            _require_keywords(node, called)


def _module(name: str) -> ModuleType | None:
    """The module; None where it exists and needs Megatron-Bridge, which few environments have."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "megatron.bridge":
            raise
        return None


def _require_keywords(call: ast.Call, called: Callable) -> None:
    given = {keyword.arg for keyword in call.keywords} - {None}
    unknown = given - _accepted(called)
    assert not unknown, f"{call.func.id} has no {', '.join(sorted(unknown))}"


def _accepted(called: Callable) -> set[str]:
    """The keywords that ``called`` takes; those of ``LLM`` are fields of its options."""
    if dataclasses.is_dataclass(called):
        return {field.name for field in dataclasses.fields(called) if field.init}
    parameters = inspect.signature(called).parameters.values()
    accepted = {one.name for one in parameters}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        from absorbed_mla.serving.llm_options import LLMOptions

        accepted |= _accepted(LLMOptions)
    return accepted
