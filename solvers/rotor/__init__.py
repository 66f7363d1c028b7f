"""Optimal checkpointing of a chain of layers (rotor): chains, tables, sequences, and the judge of sequences."""
