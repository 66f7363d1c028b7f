"""From a model, a sample and a budget to a plan, and plans as text, files and figures."""
