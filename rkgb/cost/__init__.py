"""What each node takes: time, memory, and how gradients reach its backward."""
