"""``LLM``: text from a folder with a model, or from the live model of a trainer.

``llm.py`` is what users call, and ``llm_engine.py`` its part that goes step by step; both know
texts and outputs. Below them, a runner executes steps of the engine of ``absorbed_mla/generation``:
in this process (``runner.py``), or in processes that it starts (``workers.py``). ``load.py`` builds
the model of a checkpoint in any format that the converter reads; ``server/`` serves it over HTTP.
"""
