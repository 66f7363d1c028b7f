"""What recognises the calls of a model, and finds the plan for each."""
