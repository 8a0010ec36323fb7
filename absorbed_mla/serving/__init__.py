"""Generation from a live model with Megatron-Core's dynamic inference engine.

``engine.py`` is the entry point; ``sampling.py`` and ``options.py`` are its parameters and
``requests.py`` what it returns. Nothing here copies or converts weights, so the same model can be
trained, generate, and be trained again.
"""
