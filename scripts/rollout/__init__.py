"""The parts of ``rollout_train.py`` (``entry.py``) and ``rollout_gap.py`` (``gap_entry.py``)."""
