"""Plans of a whole step, block after block: a dynamic program over the options of blocks."""
