"""The interface that rotor documents: ways to use it, errors, CheckpointOptim, and what is printed."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import rockmate
from rockmate import InfeasibleBudgetError, InputError, rotor
from rockmate.rotor import B, Fck, Fe, Fn, Loss, Sequence
from rockmate.rotor.checkpointable import flatten
from rockmate.rotor.models.utils import AtomicSequential
from solvers.rotor.chain import Stage


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))


def x() -> torch.Tensor:
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(0))


def gradients(m: nn.Module, run: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    m.zero_grad()
    run(inputs).sum().backward()
    return [p.grad for p in m.parameters() if p.grad is not None]


LIMIT = 500_000


def test_three_ways_to_use_it() -> None:
    m = model()
    wanted = gradients(copy.deepcopy(m), copy.deepcopy(m), x()) or None
    eager = copy.deepcopy(m)
    wanted = gradients(eager, eager, x())
    explicit = rotor.Checkpointable(m)
    explicit.measure(x())
    explicit.compute_sequence(LIMIT)
    constructed = rotor.Checkpointable(m, x(), LIMIT)
    first_call = rotor.Checkpointable(m, mem_limit=LIMIT)
    free = rotor.Checkpointable(m)
    for chk in (explicit, constructed, first_call, free):
        assert all(map(torch.equal, gradients(m, chk, x()), wanted))
        assert chk.sequence is not None
        assert any(isinstance(op, Fck) for op in chk.sequence) == (chk is not free)
    assert free.mem_limit is not None and free.mem_limit > 2**20


def test_limits_by_either_name_and_as_text() -> None:
    chk = rotor.Checkpointable(model(), x(), costs="flops")
    chk.compute_sequence(LIMIT)
    first = chk.sequence
    chk.compute_sequence(mem_limit=LIMIT, mem_slots=500)
    assert chk.sequence == first
    chk.compute_sequence(custom_mem_limit_bytes="500 kB")
    assert chk.sequence == first
    with pytest.raises(InputError, match="give one of them"):
        chk.compute_sequence(LIMIT, mem_limit=LIMIT)
    with pytest.raises(InputError, match="mem_slots is 0"):
        chk.compute_sequence(LIMIT, mem_slots=0)
    with pytest.raises(InputError, match="no algorithm 'best'"):
        chk.compute_sequence(LIMIT, algo="best")
    for wrong in (0, -5, "much", True):
        with pytest.raises(rockmate.BudgetError):
            chk.compute_sequence(wrong)


def test_nothing_measured() -> None:
    chk = rotor.Checkpointable(model())
    for call in (lambda: chk.build_chain(LIMIT), lambda: chk.compute_sequence(LIMIT)):
        with pytest.raises(InputError, match=r"call measure\(sample\)"):
            call()
    with pytest.raises(InputError, match="there is no sequence yet"):
        chk.get_expected_memory()
    with pytest.raises(InputError, match="use a tensor or a tuple"):
        chk.measure(None)


def test_a_limit_too_small_names_the_smallest() -> None:
    chk = rotor.Checkpointable(model(), x(), costs="flops")
    with pytest.raises(
        InfeasibleBudgetError, match=r"the smallest limit that one fits is \d+ bytes .*set by \w+"
    ) as error:
        chk.compute_sequence(1000)
    assert error.value.__cause__ is None, "one message"
    chk.compute_sequence(error.value.min_budget)
    assert chk.get_expected_memory() <= error.value.min_budget
    with pytest.raises(InfeasibleBudgetError):
        chk.compute_sequence(error.value.min_budget - 1)


def test_the_limit_that_the_error_names_is_one_that_fits() -> None:
    torch.manual_seed(0)
    blocks = [(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(2)]
    chk = rotor.Checkpointable(nn.Sequential(*(layer for block in blocks for layer in block)), costs="flops")
    chk.measure(torch.randn(64, 32).requires_grad_())
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(1000)
    chk.compute_sequence(error.value.min_budget)
    assert chk.get_expected_memory() <= error.value.min_budget


def test_eval_and_no_grad_run_the_model() -> None:
    m = model()
    chk = rotor.Checkpointable(m, x(), LIMIT, costs="flops")
    chk.sequence = None  # would have to be computed
    with torch.no_grad():
        assert torch.equal(chk(x()), m(x()))
    chk.eval()
    assert not m.training and torch.equal(chk(x()), m(x())) and chk.sequence is None
    with pytest.raises(InputError, match="eval mode"):
        chk.measure(x())


def test_smaller_batches_use_the_sequence_and_larger_ones_are_measured() -> None:
    chk = rotor.Checkpointable(model(), x(), LIMIT, costs="flops")
    sequence = chk.sequence
    chk(x()[:100]).sum().backward()
    assert chk.sequence is sequence
    with pytest.raises(InfeasibleBudgetError):
        chk(torch.cat([x()] * 4))


def test_flattening() -> None:
    atomic = rotor.models.utils.AtomicSequential(nn.Linear(2, 2), nn.Tanh())
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())), atomic, nn.Sequential())
    assert [name for name, _ in flatten(nested)] == ["0.0", "0.1.0", "1"]
    with pytest.raises(InputError, match=r"works on an nn\.Sequential"):
        rotor.Checkpointable(nn.Linear(2, 2))  # type: ignore[arg-type]
    nested[0].register_forward_hook(lambda *_: None)
    assert [name for name, _ in flatten(nested)] == ["0", "1"]
    nested.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks, which would not run"):
        rotor.Checkpointable(nested)
    with pytest.raises(InputError, match="no layers"):
        rotor.Checkpointable(nn.Sequential())


def test_layers_that_start_in_place_are_refused() -> None:
    wrong = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    with pytest.raises(InputError, match=r"layer 1 \(1\) changes its input in place.*ReLUAtEnd"):
        rotor.Checkpointable(wrong, torch.randn(4, 8))
    sequence = Sequence.parse("Fe_0, Fck_1, Fe_2, Loss, B_2, Fe_1, B_1, B_0")
    with pytest.raises(ValueError, match="changes its input in place"):
        rotor.CheckpointOptim.apply(list(wrong), sequence, None, True, torch.randn(4, 8, requires_grad=True))


def test_checkpoint_optim() -> None:
    m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
    sequence = Sequence((Fck(0), Fn(1), Fe(2), Fe(3), Loss(), B(3), B(2), Fe(0), Fe(1), B(1), B(0)))
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        m.zero_grad()
        leaf = torch.ones(4, 8, requires_grad=True)
        y = m(leaf) if plain else rotor.CheckpointOptim.apply(list(m), sequence, None, True, leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(p.grad for p in m.parameters())])
    assert all(map(torch.equal, *found))
    assert issubclass(rotor.CheckpointOptim, torch.autograd.Function)


def test_checkpoint_optim_on_an_input_without_gradient_and_a_second_backward() -> None:
    m = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    sequence = Sequence.parse("Fck_0, Fn_1, Fe_2, Fe_3, Loss, B_3, B_2, Fe_0, Fe_1, B_1, B_0")
    found = []
    for plain in (True, False):
        y = (
            m(torch.ones(4, 8))
            if plain
            else rotor.CheckpointOptim.apply(list(m), sequence, None, True, torch.ones(4, 8))
        )
        loss, parameters = y.square().sum(), list(m.parameters())
        for _ in range(2):
            found.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    assert all(torch.equal(g, wanted) for of in found[1:] for g, wanted in zip(of, found[0], strict=True))


def optim(text: str) -> torch.Tensor:
    functions, leaf = [nn.Linear(8, 8), nn.Linear(8, 8)], torch.ones(4, 8, requires_grad=True)
    found: torch.Tensor = rotor.CheckpointOptim.apply(functions, Sequence.parse(text), None, True, leaf)
    return found


def test_errors_of_checkpoint_optim() -> None:
    with pytest.raises(ValueError, match="B_0: in the forward phase"):
        optim("Fe_0, B_0, Fe_1, Loss")
    with pytest.raises(ValueError, match="Loss: in the backward phase"):
        optim("Fck_0, Fe_1, Loss, B_1, Loss, Fe_0, B_0")
    with pytest.raises(ValueError, match="1 of 2 stages have run"):
        optim("Fe_0, Loss, B_0")
    with pytest.raises(ValueError, match="Fe_0: stage 1 has to run"):
        optim("Fe_0, Fe_0, Loss, B_0")
    with pytest.raises(ValueError, match="its input is not there"):
        optim("Fck_0, Fn_1, Loss, Fe_1, B_1, Fe_0, B_0")
    with pytest.raises(AttributeError, match="is no operation"):
        rotor.CheckpointOptim.apply([nn.Linear(8, 8)], ["F"], None, True, torch.ones(4, 8, requires_grad=True))


def test_inputs_need_no_grad_in_checkpointable() -> None:
    """rotor documents a warning here; parameters get their gradients without it."""
    m = model()
    eager = copy.deepcopy(m)
    assert all(map(torch.equal, gradients(m, rotor.Checkpointable(m, x(), LIMIT), x()), gradients(eager, eager, x())))


def test_frozen_layers() -> None:
    m = model()
    for layer in (*m[:3], m[6]):
        layer.requires_grad_(False)
    eager = copy.deepcopy(m)
    chk = rotor.Checkpointable(m, x(), LIMIT, costs="flops")
    assert all(map(torch.equal, gradients(m, chk, x()), gradients(eager, eager, x())))
    assert [p.grad is None for p in m.parameters()] == [p.grad is None for p in eager.parameters()]


def test_what_the_loss_takes_is_left_free() -> None:
    plain = rotor.Checkpointable(model(), x(), costs="flops")
    greedy = rotor.Checkpointable(model(), x(), costs="flops", loss_tmp_memory_usage=300_000)
    for chk in (plain, greedy):
        chk.compute_sequence(900_000)
    assert greedy.walked().time > plain.walked().time
    assert greedy.get_expected_memory() <= 900_000


def test_verbosity_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    chk = rotor.Checkpointable(model(), x(), LIMIT, verbosity=2, costs="flops")
    chk(x()).sum().backward()
    said = capsys.readouterr().err
    assert re.search(r"rotor: persistent, 12 stages, limit 488.3 KiB, predicted peak .* overhead", said)
    assert (
        "F_ck^0" in said and re.search(r"^Fck_0 0$", said, re.MULTILINE) and re.search(r"^B_11 11$", said, re.MULTILINE)
    )


def test_the_chain_prints() -> None:
    chk = rotor.Checkpointable(model(), x(), LIMIT, costs="flops")
    assert isinstance(chk.chain, rotor.inspection.Chain)
    assert chk.chain.length == 12 and chk.chain.unit == LIMIT // 500
    lines = str(chk.chain).splitlines()
    assert lines[0].split() == ["stage", "u_f", "u_b", "a", "ā", "o_f", "o_b"] and len(lines) == 14


def test_measured_times_are_positive() -> None:
    chk = rotor.Checkpointable(model(), x(), LIMIT)
    assert chk.get_expected_makespan() > 0 and chk.chain is not None
    assert all(s.forward_time > s.tail >= 0 and s.backward_time > 0 for s in chk.chain.stages)
    with pytest.raises(InputError, match="costs is"):
        rotor.Checkpointable(model(), costs="guessed")


def test_equal_layers_take_equal_times() -> None:
    """Else the solver would take the layers that chance has measured as fast ones."""

    def times(stage: Stage) -> tuple[int, int, int]:
        return stage.forward_time, stage.tail, stage.backward_time

    layers = [
        nn.Linear(8, 32),
        *(AtomicSequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)),
        nn.Linear(32, 2048),
    ]
    chain = rotor.Checkpointable(nn.Sequential(*layers), torch.randn(4, 8), 10**6).chain
    assert chain is not None
    first, *alike, last = chain.stages
    assert all(times(s) == times(a) and s.held == a.held for s in alike for a in alike)
    assert len({times(first), times(alike[0]), times(last)}) == 3
