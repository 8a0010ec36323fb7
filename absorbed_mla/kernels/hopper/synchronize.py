"""A barrier of all threads of the program, or of the role that calls it."""

from triton.experimental.gluon import language as gl

# Triton 3.7 renamed it.
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
