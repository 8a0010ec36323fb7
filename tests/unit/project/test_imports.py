"""What an import brings in, and which way the package's own imports point."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.environment import run_python

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "absorbed_mla"

# Without a GPU, and as if neither optional package were installed, wherever this runs.
FRESH_PROCESS = """
import json, sys, time
sys.modules.update(apex=None, transformer_engine=None)
import megatron.core
before, start = set(sys.modules), time.process_time()
import absorbed_mla
public = [getattr(absorbed_mla, name) for name in absorbed_mla.__all__]
seconds = time.process_time() - start
added = sorted(set(sys.modules) - before)
import specs.absorbed_mla_layer_specs, checkpoint_conversion
import torch
print(json.dumps({"seconds": seconds, "added": added, "cuda": torch.cuda.is_initialized()}))
"""


def answer_of(code: str, *words: str, **variables: str) -> dict:
    """What Python prints as JSON when it runs ``code`` in a process of its own."""
    path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_python("-c", code, *words, path=path, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fresh_process() -> dict:
    return answer_of(FRESH_PROCESS, CUDA_VISIBLE_DEVICES="")


class TestCost:
    """Beside ``import megatron.core``, which takes seconds."""

    @pytest.mark.parametrize(
        "module", ["options", "serving.options", "serving.sampling.parameters"]
    )
    def test_options_need_no_torch(self, module):
        """Command lines show their values before anything long is imported."""
        code = f"import sys, absorbed_mla.{module}; sys.exit('torch' in sys.modules)"
        assert run_python("-S", "-c", code, path=[ROOT]).returncode == 0

    def test_processes_start_without_megatron(self):
        """What ``LLM`` needs until then; its processes import Megatron while it does."""
        names = ("executor.multiprocess", "executor.process_groups", "weights.checkpoint", "llm")
        code = ", ".join(f"absorbed_mla.serving.{name}" for name in names)
        code = f"import sys, {code}; sys.exit('megatron.core' in sys.modules)"
        assert run_python("-c", code, path=[ROOT]).returncode == 0

    def test_time(self, fresh_process):
        """CPU time of the process: 0.2 s on a quiet machine, 0.5 s on a slow and busy one."""
        assert fresh_process["seconds"] < 0.8

    def test_nothing_else_is_loaded(self, fresh_process):
        """Nor what needs TransformerEngine, nor what is for tests."""
        added = fresh_process["added"]
        own = ("absorbed_mla.", "megatron.core.")
        assert [name for name in added if not f"{name}.".startswith(own)] == []
        unwanted = ("absorbed_mla.te_linear", "absorbed_mla.testing")
        assert not any(name.startswith(unwanted) for name in added)

    def test_no_device_is_touched(self, fresh_process):
        """Otherwise a forked data loader could not use one."""
        assert not fresh_process["cuda"]


CONVERSION = ROOT / "checkpoint_conversion"
# The only module that runs models; its functions import what it needs.
WITH_MODELS = {"logits.py"}
# What the converter shares with the package: the table of checkpoint layouts, which is pure data.
SHARED = {
    "absorbed_mla",
    "absorbed_mla.registry",
    "absorbed_mla.checkpoint",
    "absorbed_mla.checkpoint.layout",
    "absorbed_mla.checkpoint.layouts",
    "absorbed_mla.checkpoint.names",
}
CONVERSION_PROCESS = """
import importlib, json, sys
from checkpoint_conversion.cli import main
light = sorted(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"command_line": light, "everything": sorted(sys.modules)}))
"""


class TestConversion:
    @pytest.fixture(scope="class")
    def loaded(self) -> dict:
        paths = [p for p in CONVERSION.rglob("*.py") if p.stem != "__main__"]
        return answer_of(CONVERSION_PROCESS, *sorted(map(module_name, paths)))

    def test_help_is_quick(self, loaded):
        """Torch takes a second, and nothing of it is needed to say what the options are."""
        assert not {"torch", "numpy", "rich", "safetensors"} & set(loaded["command_line"])

    def test_megatron_is_not_loaded(self, loaded):
        """It takes 160 MB, of the 600 that a conversion may need beside its tensors."""
        assert "torch" in loaded["everything"]
        assert not {"megatron", "transformers", "specs"} & set(loaded["everything"])
        ours = {name for name in loaded["everything"] if name.split(".")[0] == "absorbed_mla"}
        entries = {name for name in ours if name.startswith("absorbed_mla.checkpoint.layouts.")}
        assert ours - entries <= SHARED

    def test_models_are_run_in_one_place(self):
        """Also not inside functions."""
        for path in CONVERSION.rglob("*.py"):
            modules = {name for name in imports_of(path) if not is_shared(name)}
            used = {name.split(".")[0] for name in modules}
            used &= {"megatron", "transformers", "absorbed_mla", "specs"}
            assert not used or path.name in WITH_MODELS, f"{path} imports {used}"


def is_shared(name: str) -> bool:
    """Whether a module, or a name in one, is among those that the converter may import."""
    return name in SHARED or name.rpartition(".")[0] in SHARED - {"absorbed_mla"}


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it runs, by full name; not those for annotations only."""
    return imported(_running(ast.parse(path.read_text())))


def imported(nodes) -> set[str]:
    """Modules, and names in them, that are imported by some of the nodes."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _running(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Every module of the product -> modules of the product and others that it imports.

    Imports inside functions and for type annotations count: both bind one file to the other.
    """
    paths = [p for folder in PRODUCT for p in sorted((root / folder).rglob("*.py"))]
    files = {module_name(path, root): path for path in paths}
    graph = {}
    for module, path in files.items():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        found = imported(nodes)
        # "from folder import file" binds to the file, not to the folder's __init__.
        folders = {name.rpartition(".")[0] for name in found if name in files}
        names = {name for name in found if name in files or name.split(".")[0] not in PRODUCT}
        graph[module] = names - (folders - _needed(nodes, files)) - {module}
    return graph


def _needed(nodes: list[ast.AST], files: dict[str, Path]) -> set[str]:
    """Folders whose __init__ itself gives a name to the file of these nodes."""
    return {
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{alias.name}" not in files for alias in node.names)
    }


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def level_of(module: str) -> int:
    """Where a module of absorbed_mla stands in LEVELS."""
    own = module.split(".")[1]
    return next(i for i, names in enumerate(LEVELS) if own in names)


PRODUCT = ("absorbed_mla", "specs", "checkpoint_conversion")
# Of absorbed_mla, lowest first: a file may import what stands below its own level or beside it.
LEVELS = [
    {
        *("registry", "caching", "log_once", "once_differentiable", "dims", "fp8", "naive"),
        *("offloading", "graph_capture", "recomputed_outputs", "muon"),
        *("own_packages", "megatron_names", "heterogeneous_config", "prefix_tree"),
    },
    {"kernels", "sequences", "options"},
    {"batch_invariant"},
    {
        *("absorb", "norm", "rope", "linear", "te_linear", "tensor_parallel", "projections"),
        *("qk_clip", "fp8_latents", "output_gate"),
    },
    {"unsupported", "checkpoint"},
    {"core_attention"},
    {"context_parallel", "inference", "query_scaling"},
    {"dsa"},
    {"packed_router", "deepseek_router", "moe_layer"},
    {"megatron_interface", "rollout_formats", "router_replay"},
    {"attention"},
    {"cpu_host", "packed_roll", "shared_prefix_log_probs", "standard_dsa", "standard_mla"},
    {"testing"},
    # Above specs and conversion, too: they put everything together.
    {"serving", "export", "generation", "bridge", "convert_command", "lora"},
]
TOP = tuple(f"absorbed_mla.{name}" for name in sorted(LEVELS[-1]))


class TestGraph:
    @pytest.fixture(scope="class")
    def graph(self) -> dict[str, set[str]]:
        return import_graph(ROOT)

    def test_no_circles(self, graph):
        assert not cycle_in(graph)

    def test_no_import_from_above(self, graph):
        """Core attention knows nothing of the attention layer, and so on."""
        for module, imported in graph.items():
            if not module.startswith("absorbed_mla.") or module.startswith(TOP):
                continue
            used = {name for name in imported if name.split(".")[0] in PRODUCT}
            inside = {name for name in used if name.startswith("absorbed_mla.")}
            assert used == inside, f"{module}: the package stands on nothing else of the product"
            assert not {name for name in inside if level_of(name) > level_of(module)}, module

    def test_nothing_stands_on_the_top(self, graph):
        outside = [name for name in graph if not name.startswith(TOP)]
        users = {name for name in outside if any(one.startswith(TOP) for one in graph[name])}
        assert users <= {"absorbed_mla"}, "the package gives LLM its name"

    def test_every_file_has_a_level(self, graph):
        modules = {name.split(".")[1] for name in graph if name.startswith("absorbed_mla.")}
        assert modules <= set().union(*LEVELS)

    def test_the_product_imports_no_tests_or_scripts(self, graph):
        others = {"tests", "scripts", "training", "rollout", "console", "benchmarks"}
        for module, imported in graph.items():
            if not module.startswith("absorbed_mla.testing"):
                assert not {name.split(".")[0] for name in imported} & others, module
                assert not any(name.startswith("absorbed_mla.testing") for name in imported), module

    def test_specs_stand_on_the_package_alone(self, graph):
        for module in (name for name in graph if name.startswith("specs")):
            used = {name.split(".")[0] for name in graph[module]}
            assert used <= {"megatron", "absorbed_mla", "specs", *sys.stdlib_module_names}


class TestTheCheckItself:
    """On small packages made for it."""

    @pytest.fixture
    def graph(self, tmp_path):
        def make(**files: str) -> dict[str, set[str]]:
            for name, text in files.items():
                path = tmp_path / "absorbed_mla" / f"{name.replace('__', '/')}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return import_graph(tmp_path)

        return make

    def test_sees_imports_in_functions(self, graph):
        found = graph(rope="def f():\n    from absorbed_mla import norm\n", norm="")
        assert found["absorbed_mla.rope"] == {"absorbed_mla.norm"}

    def test_finds_a_circle_of_annotations(self, graph):
        type_only = "if TYPE_CHECKING:\n    from absorbed_mla.attention import Layer\n"
        found = graph(
            checkpoint__sharded=type_only, attention="import absorbed_mla.checkpoint.sharded"
        )
        assert {"absorbed_mla.attention", "absorbed_mla.checkpoint.sharded"} <= set(cycle_in(found))
        assert level_of("absorbed_mla.attention") > level_of("absorbed_mla.checkpoint.sharded")
