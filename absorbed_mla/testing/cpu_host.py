"""Former place of :mod:`absorbed_mla.cpu_host`."""

from absorbed_mla.cpu_host import enable_cpu_host

__all__ = ["enable_cpu_host"]
