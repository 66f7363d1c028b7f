"""Integer programs and the solver that they are given to."""
