"""What is said of plans of followed steps that are many."""

from __future__ import annotations

MOST_USES = 8
"""Calls of one size after which a plan of its own is made for it."""

FEWER = "steps that call the same operations on the same shapes share one"
PAD = (
    "Pad inputs to a few shapes, and mask them rather than pack them (pack_padded_sequence), which takes other "
    "operations for each batch. Where forward loops over steps in time, attach only what comes before the loop"
)
ALONE = (
    "each size that has come (lengths, or how many boxes or steps there are) calls other operations, as where forward "
    f"loops over them. From now on a size is planned when it comes for the {MOST_USES}th time. Until then it "
    "is decided as a step takes place what it keeps: such a step may take several times as long as a planned one, and "
    "one that takes more than those that were observed may exceed the budget. For plans at once, and less time, move "
    "the loop out of the module that is attached (attach the encoder, and let the loss loop behind it), or pad to a "
    "few lengths or numbers, and mask"
)
KEEP = (
    "Forward decides by numbers, or by values, that change from call to call: mask rows rather than choose or pack "
    "them (pack_padded_sequence), and keep numbers in tensors (buffers), or outside of the model"
)
