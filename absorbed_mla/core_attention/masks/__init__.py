"""Which query may see which key: spans, score rules, dropout, and the tables kernels read."""
