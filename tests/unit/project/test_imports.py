"""What an import brings in, and which way the package's own imports point."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def fresh_process() -> dict:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", FRESH_PROCESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


class TestCost:
    """Beside ``import megatron.core``, which takes seconds."""

    def test_options_need_no_torch(self):
        """Command lines show their values before anything long is imported."""
        code = "import sys, absorbed_mla.options; sys.exit('torch' in sys.modules)"
        command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT)]}; {code}"]
        assert subprocess.run(command).returncode == 0

    def test_time(self, fresh_process):
        """CPU time of the process, which other work on the machine does not stretch: 0.02 s."""
        assert fresh_process["seconds"] < 0.3

    def test_nothing_else_is_loaded(self, fresh_process):
        others = [name for name in fresh_process["added"] if name.split(".")[0] != "absorbed_mla"]
        assert [name for name in others if not name.startswith("megatron.core.")] == []

    def test_what_needs_transformer_engine_is_not_loaded(self, fresh_process):
        assert "absorbed_mla.te_linear" not in fresh_process["added"]
        assert not any(name.startswith("absorbed_mla.testing") for name in fresh_process["added"])

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
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", CONVERSION_PROCESS, *sorted(map(module_name, paths))]
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

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
    found = set()
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _running(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


IMPORTS = {module_name(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
# Lowest first: a module may import what stands before it, or beside it, and nothing behind.
LAYERS = [
    {"kernels"},
    {"batch_invariant", "dims", "options", "norm", "linear", "sequences", "first_order"},
    {"tensor_parallel", "unsupported", "absorb", "parameter_marks"},
    {"rope", "te_linear", "state_dict"},
    {"core_attention", "sharded_state", "projections", "load_hooks"},
    {"context_parallel", "inference"},
    {"attention"},
    {"distributed_checkpoint", "testing"},
]


class TestDirection:
    # The package itself exports from everywhere.
    @pytest.mark.parametrize("module", [name for name in IMPORTS if "." in name])
    def test_layers(self, module):
        """core_attention knows nothing of the attention, and so on: see LAYERS."""
        own = module.split(".")[1]
        level = next(i for i, names in enumerate(LAYERS) if own in names)
        allowed = set().union(*LAYERS[: level + 1])
        used = {name.split(".")[1] for name in IMPORTS[module] if name.startswith("absorbed_mla.")}
        assert used <= allowed

    def test_every_module_has_a_layer(self):
        modules = {name.split(".")[1] for name in IMPORTS if "." in name}
        assert modules == set().union(*LAYERS)

    @pytest.mark.parametrize("module", IMPORTS)
    def test_package_stands_alone(self, module):
        above = {"specs", "checkpoint_conversion", "tests", "scripts", "training"}
        assert not above & {name.split(".")[0] for name in IMPORTS[module]}

    def test_specs_stand_on_the_package_alone(self):
        for path in (ROOT / "specs").rglob("*.py"):
            used = {name.split(".")[0] for name in imports_of(path)}
            assert used <= {"__future__", "megatron", "absorbed_mla"}

    def test_the_check_sees_imports(self):
        """Also those inside functions."""
        assert "absorbed_mla.core_attention" in IMPORTS["absorbed_mla.attention"]
        assert "absorbed_mla.te_linear" in imports_of(ROOT / "specs/absorbed_mla_layer_specs.py")
