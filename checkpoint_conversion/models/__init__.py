"""Model types, one file each: ``deepseek_v3.py`` declares the ``model_type`` ``"deepseek_v3"``."""
