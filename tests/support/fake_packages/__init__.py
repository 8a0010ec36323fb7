"""Stand-ins for attention packages that need a GPU: their signatures, computing in float64.

``kit.py`` computes; the other files describe one package each: what it is called with, what it
demands of its arguments and which memory it leaves unwritten.
"""

from tests.support.fake_packages import flash_attention_4, transformer_engine

__all__ = ["flash_attention_4", "transformer_engine"]
