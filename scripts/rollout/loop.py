"""The rollout loop: sample, score, update, repeat."""

from __future__ import annotations

import argparse
import resource
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from absorbed_mla import LLM, SamplingParams
from console.ranks import rank
from rollout.policy import update
from rollout.replay import returned_choices
from rollout.rewards import REWARDS, group_advantages
from rollout.samples import Batch, Sample, SampleBatch, SharedPrefixBatch
from training.metrics import MetricsFile

# The token that ends a text.
_END = 256


class RolloutTrainer:
    """Trains a model on its own samples, for ``args.train_iters`` steps.

    Args:
        args: The command line.
        policy: Of ``build_policy``: model, optimizer and scheduler.
        device: Of the model.
    """

    def __init__(self, args: argparse.Namespace, policy: tuple, device: torch.device) -> None:
        self.model, self.optimizer, self.scheduler = policy
        self._args, self._device = args, device
        self._ranks = parallel_state.get_data_parallel_world_size()
        self._rank = parallel_state.get_data_parallel_rank()
        samples = args.num_prompts * args.group_size // self._ranks
        # Around the very module that is trained.
        self._llm = LLM.from_model(
            self.model,
            max_model_len=args.seq_length,
            max_num_seqs=min(args.max_requests, samples),
            seed=args.seed,
            **returned_choices(self.model, args.replay),
        )
        self._sampling = SamplingParams(
            n=args.group_size,
            max_tokens=args.num_tokens_to_generate,
            stop_token_ids=[_END],
            logprobs=0,
        )
        self.metrics = MetricsFile(args.metrics if rank() == 0 else None, 0)

    def run(self) -> None:
        """Run all steps; rank 0 prints each."""
        try:
            for step in range(self._args.train_iters):
                self._step(step)
        finally:
            self._llm.close()
            self.metrics.close()

    def rollout(self, step: int) -> list[Sample]:
        """Sample on this rank; the samples of a prompt follow each other."""
        args, samples = self._args, []
        first = step * args.num_prompts + self._rank * args.num_prompts // self._ranks
        prompts = [
            args.prompts[(first + number) % len(args.prompts)]
            for number in range(args.num_prompts // self._ranks)
        ]
        for group in self._llm.generate(prompts, self._sampling, use_tqdm=False):
            score = REWARDS[args.reward]
            rewards = [score(one.token_ids, args.num_tokens_to_generate) for one in group.outputs]
            samples += [
                Sample(
                    *(group.prompt_token_ids, one.token_ids, one.token_logprobs, *values),
                    *(one.routed_experts, one.indexer_topk),
                )
                for one, *values in zip(group.outputs, rewards, group_advantages(rewards))
            ]
        return samples

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        samples = self.rollout(step)
        sampled = time.perf_counter()
        batches = self._batches(samples)
        record = self._rewards(samples) | update(
            self.model, self.optimizer, self.scheduler, batches
        )
        if self._args.shared_prefixes:
            record |= self._pack_tokens(batches)
        record["lr"] = get_canonical_lr_for_logging(self.optimizer.param_groups)
        # Megatron accumulates the balancing losses until they are reported, and here they are not.
        get_moe_metrics_tracker().clear()
        seconds = sampled - started, time.perf_counter() - sampled
        self._report(step + 1, record, seconds)

    def _batches(self, samples: list[Sample]) -> list[Batch]:
        rows = self._args.micro_batch_size
        parts = [samples[first : first + rows] for first in range(0, len(samples), rows)]
        if self._args.shared_prefixes:
            return [SharedPrefixBatch.of(part, self._device) for part in parts]
        return [SampleBatch.of(part, self._args.seq_length, self._device) for part in parts]

    def _pack_tokens(self, batches: list[SharedPrefixBatch]) -> dict[str, int]:
        """Tokens of packs over all ranks, and of the same packs without shared prefixes."""
        counts = [[batch.tree.num_tokens, len(batch.targets)] for batch in batches]
        sums = torch.tensor(counts, device=self._device).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        shared, unshared = sums.tolist()
        return {"pack_tokens": shared, "unshared_pack_tokens": unshared}

    def _rewards(self, samples: list[Sample]) -> dict[str, float]:
        """Mean and standard deviation of the rewards over all ranks."""
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        sums = torch.stack([rewards.sum(), rewards.square().sum()]).to(self._device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        mean, square = (sums / (len(samples) * self._ranks)).tolist()
        return {"reward": mean, "reward_deviation": max(0.0, square - mean**2) ** 0.5}

    def _report(self, step: int, record: dict[str, float], seconds: tuple[float, float]) -> None:
        """Write and print the metrics of a step; ``seconds`` are those of rollout and update."""
        rollout, training = (round(record["tokens"] / part, 1) for part in seconds)
        memory = round(peak_memory(self._device))
        self.metrics.write(
            iteration=step,
            **record,
            rollout_tokens_per_second=rollout,
            training_tokens_per_second=training,
            memory_mib=memory,
        )
        if rank() == 0:
            packs = ""
            if "pack_tokens" in record:
                packs = "trained on {pack_tokens} tokens instead of {unshared_pack_tokens} | "
            print(
                f"step {step:4d}/{self._args.train_iters} | reward {record['reward']:.3f} "
                f"(deviation {record['reward_deviation']:.3f}) | log-prob gap max "
                f"{record['log_prob_gap_max']:.1e} mean {record['log_prob_gap_mean']:.1e} | "
                f"entropy {record['entropy']:.2f} | sampled tokens/s: rollout {rollout:.0f}, "
                f"training {training:.0f} | {packs.format(**record)}{memory} MiB",
                flush=True,
            )


def peak_memory(device: torch.device) -> float:
    """Peak memory in MiB: allocated on this GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
