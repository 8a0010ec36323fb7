"""Reinforcement learning with one live model: sample, score, update, repeat; on CPUs or GPUs.

    torchrun --nproc-per-node 2 scripts/rollout_train.py --tensor-model-parallel-size 2 \
        --sequence-parallel --reward digits --train-iters 60 \
        --metrics rewards.jsonl --plot rewards.png

Megatron's inference engine samples from the very module that Megatron's optimizer updates: nothing
is converted or copied in between. Rewards are small programs over the sampled bytes, advantages
are normalised within the group of a prompt (GRPO, arXiv:2402.03300), the update is REINFORCE's.
Every step prints by how much the log-probabilities of the sampled tokens differ between the rollout
and the forward that trains.
"""

if __name__ == "__main__":
    from console.script import start

    start("rollout.entry")
