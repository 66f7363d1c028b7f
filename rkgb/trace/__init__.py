"""Recording what a module computes, and what it reads, writes and draws meanwhile."""
