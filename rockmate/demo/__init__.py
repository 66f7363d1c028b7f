"""The main job, ``python -m rockmate.demo``: a GPT-2-like model and a text to train it on."""
