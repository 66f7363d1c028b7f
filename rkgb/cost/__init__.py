"""Costs: the time and memory of each node or stage, measured alone, and the layouts of gradients."""
