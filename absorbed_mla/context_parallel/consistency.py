"""Finding out that context-parallel ranks do not agree, before they exchange anything else."""

from __future__ import annotations

import functools
import zlib

import torch
import torch.distributed as dist

from absorbed_mla.sequences import SequenceLayout

_ITEMS = ("tokens of all ranks", "batch", "element size of the dtype", "sequence boundaries (CRC)")


def require_agreement(
    group: dist.ProcessGroup, layout: SequenceLayout, batch: int, dtype: torch.dtype
) -> None:
    """Check that every rank of ``group`` passes the same shapes and boundaries.

    On a GPU the answer has to be waited for, so a call that repeats a former one is not checked
    there; ranks that then disagree end in the process group's timeout.

    Raises:
        ValueError: On every rank, with what each of them has.
    """
    boundaries = _checksum(layout)
    item_size = torch.finfo(dtype).bits // 8
    mine = (layout.num_tokens, batch, item_size, boundaries)
    if torch.cuda.is_available():
        _compare_once(group, mine)
    else:
        _compare(group, mine)


@functools.lru_cache(maxsize=64)
def _checksum(layout: SequenceLayout) -> int:
    return zlib.crc32(repr((layout.starts, layout.lengths, layout.slots)).encode())


def _compare(group: dist.ProcessGroup, mine: tuple[int, ...]) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * len(mine), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, own, group=group)
    by_rank = everyone.view(group.size(), len(mine)).tolist()
    differing = [
        f"{item}: {', '.join(str(value) for value in values)}"
        for item, values in zip(_ITEMS, zip(*by_rank))
        if len(set(values)) > 1
    ]
    if differing:
        raise ValueError(
            "the context-parallel ranks were given different input; rank by rank, "
            + "; ".join(differing)
        )


_compare_once = functools.lru_cache(maxsize=1024)(_compare)
