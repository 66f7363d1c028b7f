"""Optimal checkpointing of a chain of layers: chain, table, sequences, and their judge."""
