"""``LLM``: text from a folder with a model, or from the live model of a trainer.

``llm.py`` is what users call; it knows texts and outputs. Below it, a runner executes steps of the
engine of ``absorbed_mla/generation``: in this process (``runner.py``), or in processes that it
starts (``workers.py``). ``load.py`` builds the model of any checkpoint; ``server/`` serves it.
"""
