"""Train a GPT with multi-head latent attention through Megatron's loop, on CPUs or GPUs.

    torchrun --nproc-per-node 2 scripts/train.py --preset tiny \
        --tensor-model-parallel-size 2 --sequence-parallel --train-iters 200 \
        --save checkpoints --save-interval 100 --metrics metrics.jsonl --plot loss.png

Megatron's arguments are taken, and ``--help`` lists those that it does not have. The data is the
source code of Python's standard library unless ``--data`` names a file or folder.
"""

if __name__ == "__main__":
    from console.script import start

    start("training.entry")
