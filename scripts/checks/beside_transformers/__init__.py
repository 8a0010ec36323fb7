"""``LLM`` beside transformers: the models, what is measured of each, and the table of results."""
