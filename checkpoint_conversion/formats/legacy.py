"""Reader of ``megatron-legacy``: Megatron's former format, one ``model_optim_rng.pt`` per rank.

Layers and experts are numbered from 0 on every rank. The mapping to Hugging Face numbers those of
the whole model:

    decoder.layers.<in the stage>                     decoder.layers.<in the model>
    mtp.layers.I.mtp_model_layer.                     mtp.layers.I.transformer_layer.
    mlp.experts.local_experts.<on the rank>.          mlp.experts.local_experts.<of the layer>.
    mlp.experts.linear_fc1.weight<on the rank>        the same (TransformerEngine's grouped GEMM)

Megatron's former ``GroupedMLP`` had two parameters for all E experts of a rank, transposed:

    mlp.experts.weight1   [hidden, E * 2 * I]   ->  [E, hidden, 2 * I], columns [gate, up]
    mlp.experts.weight2   [E * I, hidden]       ->  [E, I, hidden]

where I is the rank's share of an expert's width. Each expert is one block of consecutive bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absorbed_mla.checkpoint.names import KV_DOWN, Q_DOWN, QKV_DOWN
from checkpoint_conversion.checkpoint_folder import RANK_FILE, rank_folders
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.formats.legacy_ranks import (
    Rank,
    RankFile,
    Sizes,
    folder_problems,
    read_rank_file,
    sizes_of,
)
from checkpoint_conversion.formats.megatron_folder import MegatronCheckpoint
from checkpoint_conversion.formats.pt_file import StoredTensor
from checkpoint_conversion.layouts import VOCABULARY, MegatronLayout, tensor_parallel_rule
from checkpoint_conversion.lazy_tensor import LazyTensor, same_values
from checkpoint_conversion.mapping_table import Rule
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.source import Source

_EMBEDDING, _OUTPUT = VOCABULARY
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,2})\.")
_MTP_INNER = re.compile(r"(mtp\.layers\.\d+\.)(?:mtp_model_layer|transformer_layer)\.")
_SEQUENTIAL = re.compile(r"(.*mlp\.experts\.local_experts\.)(\d+)(\.linear_fc[12]\.weight)")
_GROUPED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12])\.weight(\d+)")
_GROUPED_MLP = re.compile(r"(.*mlp\.experts\.)weight([12])")


class LegacyCheckpoint(MegatronCheckpoint):
    """A per-rank checkpoint, opened by reading the pickles of all ranks' files.

    Raises:
        CheckpointError: If rank files are missing, superfluous or damaged, or nothing describes
            the model.
    """

    format = "megatron-legacy"

    def __init__(self, path: Path, **how: Any) -> None:
        super().__init__(path, **how)
        self._sizes, self._files = _read_files(self.folder, self.source)
        first, self.stored, self.left_alone = self._files[Rank()], {}, {}
        for file in self._files.values():
            for name, tensor in file.weights.items():
                self.stored[f"{file.folder}/{name}"] = tensor.lazy(f"{file.folder}/{name}")
            for name, size in file.left_alone.items():
                self.left_alone[f"{file.folder}/{name}"] = size
        names = [name for file in self._files.values() for name in file.weights]
        embedding = first.weights.get(_EMBEDDING)
        rows = embedding.shape[0] * self._sizes.tensor if embedding and embedding.shape else 0
        states = [name for name in self.left_alone if name.endswith("_extra_state")]
        self.describe_model(first.args, _count(_MTP_LAYER, names), rows, states)
        self._first_layers = _first_layers(self.config, self._sizes, self._files)
        self.layout = _describe(self.config, self._sizes, names, first.iteration)

    def whole_tensors(self) -> dict[str, LazyTensor]:
        """Merge what the ranks have; see the base class.

        Raises:
            CheckpointError: Listing what cannot be read, what only some tensor-parallel ranks
                have, and shares of different shapes and dtypes.
        """
        copies: dict[str, list[LazyTensor]] = {}
        problems: list[str] = []
        sizes, experts = self._sizes, self.config.num_experts // self._sizes.expert
        for stage, expert_rank in itertools.product(range(sizes.pipeline), range(sizes.expert)):
            files = [self._files[Rank(i, stage, expert_rank)] for i in range(sizes.tensor)]
            ranks = [self._mapped(file, problems) for file in files]
            for name in dict.fromkeys(itertools.chain(*ranks)):
                lacking = [file.folder for file, own in zip(files, ranks) if name not in own]
                if lacking:
                    problems.append(
                        f"{name} is missing in {', '.join(lacking)}; other tensor-parallel ranks "
                        "have it"
                    )
                    continue
                whole = whole_name(name, self._first_layers[stage], experts * expert_rank)
                if self.config.tied_embeddings and whole == _OUTPUT:
                    whole = _EMBEDDING
                shares = [own[name] for own in ranks]
                try:
                    copies.setdefault(whole, []).append(_merge(whole, shares, self.config))
                except CheckpointError as error:
                    problems.append(f"{name} of {', '.join(f.folder for f in files)} {error}")
        for whole, same in copies.items():
            if len({(tensor.shape, tensor.dtype) for tensor in same}) > 1:
                found = " and ".join(sorted({f"{t.dtype} {t.shape}" for t in same}))
                problems.append(f"{whole} is {found} on different ranks")
        raise_problems(
            f"The ranks' files do not fit the model; {len(problems)} problems:", problems
        )
        problem = "are copies of one weight, but differ"
        return {whole: same_values(same, problem) for whole, same in copies.items()}

    def _mapped(self, file: RankFile, problems: list[str]) -> dict[str, LazyTensor]:
        """A file's tensors under the mapping's names, with the rank's own numbering."""
        problems += file.problems
        experts = self.config.num_experts // self._sizes.expert
        result: dict[str, LazyTensor] = {}
        for name, tensor in file.weights.items():
            leaf = f"{file.folder}/{name}"
            found: dict[str, LazyTensor] | None = {as_mapped(name): self.stored[leaf]}
            if _GROUPED_MLP.fullmatch(name):
                found = _split_grouped_mlp(name, tensor, leaf, experts, self.config.hidden_size)
            if found is None:
                problems.append(
                    f"{leaf} has shape {tensor.shape}, which is not that of {experts} experts"
                )
                continue
            twice = found.keys() & result.keys()
            problems += [f"{leaf} is in the file under another name, too" for _ in twice]
            result.update(found)
        return result


def _read_files(inner: Path, source: Source) -> tuple[Sizes, dict[Rank, RankFile]]:
    """The sizes of the grid of ranks, and every rank's file."""
    folders = {path.name: path for path in rank_folders(inner)}
    if not folders:
        raise CheckpointError(f"{inner} has no mp_rank_*/{RANK_FILE}")
    # Any rank's args give the sizes; folder names alone are ambiguous.
    first = read_rank_file(next(iter(folders.values())), source)
    sizes = sizes_of(first.args, folders)
    problems = folder_problems(folders, sizes)
    raise_problems(f"{inner} is not complete:", problems)
    files = {}
    for rank in sizes.ranks():
        folder = folders[sizes.folder(rank)]
        same = folder.name == first.folder
        files[rank] = first if same else read_rank_file(folder, source)
    if len({file.iteration for file in files.values()}) > 1:
        raise CheckpointError(
            f"{inner} has files of different iterations:",
            [f"{file.folder} is of iteration {file.iteration}" for file in files.values()],
        )
    return sizes, files


def _first_layers(config: ModelConfig, sizes: Sizes, files: Mapping[Rank, RankFile]) -> list[int]:
    """Number of the first decoder layer of each pipeline stage, by the layers in their files."""
    counts = [
        _count(_DECODER_LAYER, files[Rank(pipeline=stage)].weights)
        for stage in range(sizes.pipeline)
    ]
    problems = []
    if sum(counts) != config.num_layers:
        problems.append(
            f"the stages' files hold {', '.join(map(str, counts))} layers, together {sum(counts)}; "
            f"the model has {config.num_layers}"
        )
    if config.num_experts % sizes.expert:
        problems.append(
            f"{config.num_experts} experts cannot be shared by {sizes.expert} expert-parallel ranks"
        )
    raise_problems("The ranks' files do not fit the model:", problems)
    return [sum(counts[:stage]) for stage in range(sizes.pipeline)]


def _count(pattern: re.Pattern, names: Iterable[str]) -> int:
    """How many layers there are, by the largest number in the names."""
    return max((int(match[1]) + 1 for match in map(pattern.match, names) if match), default=0)


def _describe(
    config: ModelConfig, sizes: Sizes, names: Sequence[str], iteration: int | None
) -> dict[str, object]:
    """The entries of :attr:`Checkpoint.layout`."""
    result = MegatronLayout.recognise(map(as_mapped, names)).describe()
    if config.num_experts:
        modules = {"grouped": _GROUPED, "sequential": _SEQUENTIAL}
        found = (kind for kind, name in modules.items() if any(map(name.fullmatch, names)))
        result["experts"] = next(found, "GroupedMLP")
    result["tensor_parallel"] = sizes.tensor
    result["pipeline_parallel"] = sizes.pipeline
    if sizes.expert > 1:
        result["expert_parallel"] = sizes.expert
    if iteration is not None:
        result["iteration"] = iteration
    return result


def as_mapped(name: str) -> str:
    """The mapping's name for a tensor inside an MTP layer, or of an expert of a grouped module."""
    name = _MTP_INNER.sub(r"\1transformer_layer.", name)
    match = _GROUPED.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{match[3]}.{match[2]}.weight"


def whole_name(name: str, first_layer: int, first_expert: int) -> str:
    """The name in the whole model of a tensor on a rank with this first layer and expert."""
    layer = _DECODER_LAYER.match(name)
    if layer:
        name = f"decoder.layers.{int(layer[1]) + first_layer}.{name[layer.end() :]}"
    expert = _SEQUENTIAL.fullmatch(name)
    return f"{expert[1]}{int(expert[2]) + first_expert}{expert[3]}" if expert else name


def _merge(whole: str, shares: Sequence[LazyTensor], config: ModelConfig) -> LazyTensor:
    """The tensor of the model called ``whole``, from the shares of the tensor-parallel ranks.

    An unknown tensor is one of the shares, and refused later by its name.
    """
    found = sorted({f"{share.dtype} {share.shape}" for share in shares})
    if len(found) > 1:
        raise CheckpointError(f"is {' and '.join(found)} on different ranks")
    rule = _rule(whole, shares[0].shape, config)
    if rule is None or len(shares[0].shape) <= (rule.dim or 0):
        return shares[0]
    return rule.merge(shares)


def _rule(whole: str, shape: tuple[int, ...], config: ModelConfig) -> Rule | None:
    """How ranks share a tensor: local layers split the rows of down-projections."""
    q, latent = config.q_lora_rank or 0, config.kv_lora_rank + config.qk_rope_head_dim
    for end, stacked in {Q_DOWN: (q,), KV_DOWN: (latent,), QKV_DOWN: (q, latent)}.items():
        if whole.endswith(f".{end}") and shape and shape[0] < sum(stacked):
            return Rule(0, stacked)
    return tensor_parallel_rule(whole)


def _split_grouped_mlp(
    name: str, stored: StoredTensor, leaf: str, experts: int, hidden: int
) -> dict[str, LazyTensor] | None:
    """The experts in a ``GroupedMLP`` parameter, under the names of sequential experts.

    None if the parameter's shape does not fit ``experts`` on the rank.
    """
    match = _GROUPED_MLP.fullmatch(name)
    assert match is not None
    first = match[2] == "1"
    per_expert = math.prod(stored.shape) // max(1, experts * hidden)
    expected = (hidden, experts * per_expert) if first else (experts * per_expert, hidden)
    if stored.shape != expected or not per_expert or not stored.is_contiguous:
        return None
    block = (hidden, per_expert) if first else (per_expert, hidden)
    lazy = stored.view(experts, *block).lazy(leaf)
    return {
        f"{match[1]}local_experts.{expert}.linear_fc{match[2]}.weight": lazy.narrow(
            0, expert, 1
        ).map(lambda values: values[0].t().contiguous(), shape=block[::-1])
        for expert in range(experts)
    }
