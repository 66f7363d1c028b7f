"""What one run shows of a recorded program, and whether the program is right on other values."""
