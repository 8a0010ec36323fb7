"""The overlap scheduler: a step is launched before the results of the last one are read."""
