"""Generate text with a checkpoint of train.py or of the conversion, on CPUs or GPUs.

    torchrun --nproc-per-node 2 scripts/generate.py --load checkpoints \
        --prompt "def main(" --num-tokens-to-generate 100 --temperature 0.7 --top-p 0.9

The engine is Megatron's (paged latent cache, chunked prefill, prefix cache); the model is the one
that train.py trains. Prompts come from the command line, a file or stdin, and run together; the
text of the first one that has not ended is shown while it grows. Exit code: 0; 1 if a prompt could
not be continued; 2 if nothing was started.
"""

if __name__ == "__main__":
    from console.script import start

    start("generation.entry")
