"""Models whose own Python runs in every forward: what it computes is followed, and saved tensors are made again."""
