"""FlashMLA's compiled library: of vLLM, or as a file that was taken out of its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kit.report import Refused

LIBRARY = Path("/tmp/peers/_flashmla_C.abi3.so")


def flash_mla_operators() -> Any:
    """The namespace of its operators, without a Python package.

    Raises:
        Refused: If there is no library.
    """
    import torch

    if not hasattr(torch.ops._flashmla_C, "sparse_prefill_fwd"):
        if not LIBRARY.is_file():
            raise Refused(f"FlashMLA's library is not at {LIBRARY}")
        torch.ops.load_library(str(LIBRARY))
    return torch.ops._flashmla_C
