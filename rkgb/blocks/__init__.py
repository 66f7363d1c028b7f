"""Grouping operations to nodes and nodes to blocks, and telling which blocks are alike."""
