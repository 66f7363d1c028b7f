"""The options of one block: which data it keeps, and its memory and time, by integer programs."""
