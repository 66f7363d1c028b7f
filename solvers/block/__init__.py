"""The options of one block: what it may keep, at which memory and time (an integer program)."""
