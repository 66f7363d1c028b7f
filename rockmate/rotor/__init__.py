"""rotor: an ``nn.Sequential`` under a memory limit, by optimal checkpointing of a chain of measured layers.

    from rockmate import rotor

    model = rotor.Checkpointable(rotor.models.resnet18(), sample, "700 MB")
    loss = criterion(model(x), y)
    loss.backward()

The interface is that of rotor (https://hiepacs.gitlabpages.inria.fr/rotor); the implementation is ours.
"""

from rockmate.errors import InfeasibleBudgetError
from rockmate.rotor import inspection, models
from rockmate.rotor.checkpointable import Checkpointable
from rockmate.rotor.execution import CheckpointOptim
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence

__all__ = [
    "B",
    "CheckpointOptim",
    "Checkpointable",
    "Fck",
    "Fe",
    "Fn",
    "InfeasibleBudgetError",
    "Loss",
    "Operation",
    "Sequence",
    "inspection",
    "models",
]
