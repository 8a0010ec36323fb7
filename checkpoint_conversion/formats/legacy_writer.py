"""Writing ``megatron-legacy``: one ``mp_rank_*/model_optim_rng.pt`` per rank.

Every file holds what ``torch.load`` and Megatron's ``--ckpt-format torch`` expect: ``args``,
``checkpoint_version``, ``iteration`` and ``model``, the state dict of the rank's model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import (
    Entry,
    Part,
    PartResult,
    Progress,
    TargetOptions,
    Writer,
    tensor_record,
)
from checkpoint_conversion.formats.legacy_names import as_stored, extra_states
from checkpoint_conversion.formats.legacy_ranks import Sizes, even_stages
from checkpoint_conversion.formats.legacy_sharding import Sharding
from checkpoint_conversion.formats.megatron_folder import inner_name, write_around
from checkpoint_conversion.formats.pt_writer import reserve, write_values
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model_config import ModelConfig
from checkpoint_conversion.tensor_parallel import COLUMNS
from checkpoint_conversion.vocabulary import padded_size, with_padding

# Megatron's own default of --make-vocab-size-divisible-by.
_VOCAB_MULTIPLE = 128
# Small tensors are read in sessions of this many bytes, so that each opens few files.
_SESSION = 32 << 20


class LegacyWriter(Writer):
    """Writes a checkpoint of one file per rank; a part is a file.

    Args:
        config: The model.
        options: How to write it.
        to: The format's name.

    Raises:
        CheckpointError: If the options ask for what the format, or the model, cannot have.
    """

    format = "megatron-legacy"

    def __init__(
        self, config: ModelConfig, options: TargetOptions, to: str = "megatron-legacy"
    ) -> None:
        assert to == self.format
        self.config = config
        self.options = options
        _refuse_unsupported(options)
        norms = options.norms or "fused"
        by_norms = "duplicated" if norms == "fused" else "column-parallel"
        multiple = (options.vocab_multiple or _VOCAB_MULTIPLE) * options.tensor_parallel
        self._sharding = Sharding(
            config=config,
            layout=MegatronLayout(norms=norms, kv_up=options.kv_up, down=options.down),
            sizes=Sizes(options.tensor_parallel, options.pipeline_parallel),
            stages=even_stages(config.num_layers, options.pipeline_parallel),
            mtp_stage=options.pipeline_parallel - 1,
            down_projection=options.down_projection or by_norms,
            vocab_rows=padded_size(config.vocab_size, multiple),
        )
        problems = self._sharding.indivisible()
        if problems:
            raise CheckpointError(
                f"--tensor-model-parallel-size {options.tensor_parallel} ranks cannot share "
                "equally:",
                problems,
            )

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """See :meth:`Writer.plan`; a file cannot be split, so ``part_bytes`` does not matter."""
        sharding = self._sharding
        padded = with_padding(to_megatron(tensors, self.config), sharding.vocab_rows)
        whole = laid_out_tensors(padded, sharding.layout, self.config)
        cut = {name: self._cut(name, tensor) for name, tensor in whole.items()}
        parts = []
        for rank in sharding.sizes.ranks():
            folder = sharding.sizes.folder(rank)
            entries = tuple(
                Entry(
                    f"{folder}/{as_stored(name, self.options.experts)}",
                    cut[share.whole][rank.tensor],
                )
                for name, share in sharding.shares(rank.pipeline).items()
            )
            peak = max(sum(e.tensor.peak for e in group) for group in _read_together(entries))
            parts.append(Part(folder, entries, peak))
        return parts

    def layout(self) -> dict[str, object]:
        """See :meth:`Writer.layout`."""
        return self._sharding.describe(self.options.experts, self.options.iteration)

    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """See :meth:`Writer.write_part`.

        A rank's file is larger than what may be resident, so ``session`` is not used: tensors are
        read in short sessions of their own.
        """
        path = folder / inner_name(self.options.iteration) / part.name / RANK_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        places = reserve(
            path,
            {entry.key: entry.tensor for entry in part.entries},
            lambda empty: self._content(part, empty),
        )
        records = []
        with open(path, "r+b") as file:
            for group in _read_together(part.entries):
                with ReadSession() as own:
                    for entry in group:
                        records.append(_write(file.fileno(), entry, places[entry.key], own))
                        progress(entry.tensor.nbytes)
        name = path.relative_to(folder).as_posix()
        return PartResult(part.name, {name: path.stat().st_size}, records)

    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """See :meth:`Writer.finish`."""
        write_around(folder, self.options.iteration, self.config, auxiliary)

    def _cut(self, name: str, tensor: LazyTensor) -> list[LazyTensor]:
        """The shares of all tensor-parallel ranks, each with its values in order."""
        rule, size = self._sharding.rule(name), self._sharding.sizes.tensor
        shares = rule.shard(tensor, size)
        if rule is COLUMNS and size > 1:
            return [share.map(lambda values: values.contiguous()) for share in shares]
        return shares

    def _content(self, part: Part, empty: Mapping[str, Tensor]) -> dict[str, object]:
        """What a rank's file holds, around tensors that have no values yet."""
        sizes = self._sharding.sizes
        rank = next(rank for rank in sizes.ranks() if sizes.folder(rank) == part.name)
        model: dict[str, Tensor | None] = {
            key.removeprefix(f"{part.name}/"): tensor for key, tensor in empty.items()
        }
        last_stage = rank.pipeline == sizes.pipeline - 1
        states = extra_states(list(model), self._sharding.layout.norms, last_stage)
        largest = max(part.entries, key=lambda entry: entry.tensor.nbytes)
        content: dict[str, object] = {
            "args": self._args(largest.tensor),
            "checkpoint_version": 3.0,
            "model": model | dict.fromkeys(states),
        }
        if self.options.iteration is not None:
            content["iteration"] = self.options.iteration
        return content

    def _args(self, weight: LazyTensor) -> argparse.Namespace:
        """The arguments of a training that would have saved the checkpoint."""
        options, fused = self.options, self._sharding.layout.norms == "fused"
        args = to_megatron_args(
            self.config,
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            dtype=weight.dtype,
            padded_vocab_size=self._sharding.vocab_rows,
        )
        args.ckpt_format = "torch"
        args.transformer_impl = "transformer_engine" if fused else "local"
        args.moe_grouped_gemm = options.experts == "grouped"
        args.make_vocab_size_divisible_by = options.vocab_multiple or _VOCAB_MULTIPLE
        return args


def _read_together(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries in order, in groups of at most ``_SESSION`` bytes, or of one."""
    group: list[Entry] = []
    total = 0
    for entry in entries:
        if group and total + entry.tensor.peak > _SESSION:
            yield group
            group, total = [], 0
        group.append(entry)
        total += entry.tensor.peak
    yield group


def _write(descriptor: int, entry: Entry, place: int, session: ReadSession) -> dict:
    """Write one tensor; what the manifest says of it."""
    values = entry.tensor.load(session).contiguous()
    assert values.shape == entry.tensor.shape, entry.key
    assert values.dtype == entry.tensor.dtype, entry.key
    write_values(descriptor, values, place)
    return tensor_record(entry.key, values)


def _refuse_unsupported(options: TargetOptions) -> None:
    problems = []
    if options.fp8 is not None:
        problems.append(f"--fp8 {options.fp8}: Megatron's weights are not quantised; use --to hf")
    if options.layers not in (None, "numbered"):
        problems.append(f"--layers {options.layers}: per-rank files have numbered layers only")
    if options.max_shard_bytes is not None:
        problems.append("--max-shard-size: a rank has one file; use more ranks")
    if problems:
        raise CheckpointError("--to megatron-legacy cannot do this:", problems)
