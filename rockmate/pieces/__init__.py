"""Compiled pieces: the light operations of a captured program, in kernels that Inductor made."""
