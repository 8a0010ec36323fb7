"""What all benchmarks share: arguments, timing, machine description, reports, tables and plots."""
