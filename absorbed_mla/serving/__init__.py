"""Serving: everything that only generation needs, above the layer, its specs and the converter.

``llm.py`` is what users call for text, and ``llm_engine.py`` its part that goes step by step.
``executor/`` runs steps of ``engine.py`` in this process or in processes of its own; the engine is
Megatron-Core's dynamic inference engine (``megatron_engine.py``) around a live model, with the
steps of ``scheduler/`` and the tokens of ``sampling/``. ``weights/`` builds the model of a
checkpoint, ``server/`` serves it over HTTP, ``export/`` gives a live model's weights away.

Nothing here copies or converts the weights of a live model: it is trained, generates, and is
trained again.
"""
