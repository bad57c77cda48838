"""Architectures, and how their weights are read. Parallelism and quantisation are applied from outside."""
