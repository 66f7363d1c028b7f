"""Followed models whose steps are other ones from time to time: results as in eager mode, within the budget."""

from __future__ import annotations

import pytest
import torch
from against_eager import assert_same
from test_steps import MODELS, again, batches, eager_peak, made, seeded, trained

from rockmate import attach, measure_peak
from rockmate.follow.plan import FollowedPlan


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_and_within_the_budget(name: str) -> None:
    """A step that was not seen before may exceed the budget; it is planned from the next such step on."""
    budget = int(0.75 * eager_peak(name, 8))
    model = made(name)
    handle = attach(model, budget, costs="flops")
    assert_same(trained(model, 8), trained(made(name), 8))
    seeded()
    for k, x in enumerate(batches(6)):
        step = again(model, x)
        step()
        step()
        peak = measure_peak(step, "cpu")
        assert peak <= budget, f"step {k}: {peak} of {budget}"
    plans = [planned.plan for planned in handle.plans]
    assert all(isinstance(plan, FollowedPlan) and plan.predicted_peak <= budget for plan in plans)
    assert max(plan.recomputed for plan in plans if plan is not None) > 0
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
