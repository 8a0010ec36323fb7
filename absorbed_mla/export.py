"""Weights of a live model for inference engines, under public names: see ``serving/export``."""

from absorbed_mla.serving.export import *  # noqa: F403
from absorbed_mla.serving.export import __all__  # noqa: F401
