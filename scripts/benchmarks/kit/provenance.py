"""Where results come from: device, versions, date, commit and command line."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Packages that the time of an attention on a GPU depends on.
ATTENTION_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine-torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
)
CUDNN_OF_TORCH, CUDNN_OF_TE = "cudnn of torch", "cudnn of transformer-engine"
_LAUNCHED = "TORCHELASTIC_RUN_ID"


def describe(on_gpu: bool, dtype: Any, **more: Any) -> dict:
    """The environment of a benchmark's report.

    Args:
        on_gpu: Whether a GPU is measured.
        dtype: Of torch, of weights and activations.
        more: What else all cases have in common.
    """
    import torch

    return {
        **source(),
        "device": torch.cuda.get_device_name() if on_gpu else processor(),
        "dtype": str(dtype).removeprefix("torch."),
        **more,
        "versions": attention_versions(on_gpu) | more.get("versions", {}),
    }


def source() -> dict[str, str]:
    """Date, command line and commit."""
    launcher = ["python"]
    if _LAUNCHED in os.environ:
        launcher = ["torchrun", f"--nproc-per-node={os.environ['WORLD_SIZE']}"]
    # Results are published: folders of this machine are not for them.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    command = shlex.join([*launcher, *words])
    return {"date": today(), "command": command, "commit": commit()}


def sentence(about: dict) -> str:
    """A description in words."""
    head = ("date", "command", "commit", "device", "dtype", "versions")
    device = ", ".join(str(about[name]) for name in ("device", "dtype") if name in about)
    facts = [device, *(_fact(name, value) for name, value in about.items() if name not in head)]
    measured = f"Measured on {about['date']} by `{about['command']}` at {about['commit']}: "
    return measured + "; ".join(filter(None, [*facts, _fact("", about["versions"])])) + "."


def ceilings_reached(about: dict) -> str:
    """The ceilings of the device, as ``timing.ceilings`` found them."""
    reached = about["ceilings"]
    return (
        f"{about['device']}: product {reached['matmul_tflops']:.3g} TFLOP/s, "
        f"copy {reached['copy_tbps']:.3g} TB/s"
    )


def _fact(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_fact(f"{key}", one) for key, one in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{name.replace('_', ' ')} {text}" if text else ""


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str:
    """Of the checkout; the variable ``GIT_COMMIT`` takes precedence, for copies without git."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def processor() -> str:
    """Name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python and of the packages."""
    found = {"python": platform.python_version()} | dict.fromkeys(packages, "not installed")
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def attention_versions(on_gpu: bool) -> dict[str, str]:
    """Of ``ATTENTION_PACKAGES`` and, on a GPU, of CUDA and of the cuDNN that each library runs.

    TransformerEngine loads the cuDNN that it finds first, which need not be the one that PyTorch
    was installed with.
    """
    found = versions(ATTENTION_PACKAGES)
    if on_gpu:
        import torch

        found["cuda"] = torch.version.cuda or "unknown"
        found[CUDNN_OF_TORCH] = cudnn_of_torch()
        found[CUDNN_OF_TE] = cudnn_of_transformer_engine()
    return found


def cudnn_of_torch() -> str:
    """The version that PyTorch runs, which may be another than it was compiled against."""
    import torch

    try:
        return cudnn_text(torch.backends.cudnn.version())
    except RuntimeError as error:
        pairs = [part.replace(", ", ".") for part in re.findall(r"\(([\d, ]+)\)", str(error))]
        return "{1} (PyTorch was compiled against {0})".format(*pairs, *"??")


def cudnn_of_transformer_engine() -> str:
    """The version that TransformerEngine loaded, asked of the library itself."""
    try:
        # It loads cuDNN; the library of the next line cannot be imported before.
        importlib.import_module("transformer_engine.pytorch")
        library = importlib.import_module("transformer_engine_torch")
    except ImportError:
        return "not installed"
    # A broken installation raises other errors, too.
    except Exception as error:
        return f"cannot be imported ({type(error).__name__})"
    return cudnn_text(library.get_cudnn_version())


def cudnn_text(number: int | None) -> str:
    """``"9.14.0"`` for 91400, as cuDNN 9 and newer count."""
    if number is None:
        return "not installed"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
