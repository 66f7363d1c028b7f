"""A schedule made executable, and the executor that runs it with autograd's own graph."""
