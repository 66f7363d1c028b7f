"""Problems, schedules, and solvers that find good schedules within a memory budget. Imports no torch.

A ``Problem`` describes a training step by the bytes and nanoseconds of its nodes. A ``Schedule`` is the order in which
nodes run, run again and are deleted. ``walk`` checks a schedule and computes its peak memory and time.
``solve(problem, budget)`` runs a solver by name and returns a verified ``Solution``. ``frontier(problem)`` returns time
against memory for all budgets. ``block_options`` solves one block, ``ChainPlanner`` a chain of blocks.
"""

import solvers.chain.solvers
import solvers.whole.solvers  # noqa: F401  registers the solvers of a ``GraphProblem``
from solvers.baselines import all_baselines, checkpoint_blocks, chen_sqrt, keep_everything, recompute_all
from solvers.block.block import Option
from solvers.block.ilp import Grid, block_options
from solvers.chain.bound import lower_bound
from solvers.chain.chain import ChainPlan, ChainPlanner, solve_chain
from solvers.chain.costs import Options, SolvedViews
from solvers.chain.refine import improve
from solvers.curve import Baseline, Frontier
from solvers.errors import InfeasibleError, ProblemError, ScheduleError, SolverError
from solvers.files.files import format_problem, parse_problem, read_problem, write_problem
from solvers.liveness import drop_useless_runs, with_deletes
from solvers.milp.options import SolverOptions
from solvers.problem import Backward, Block, Data, Node, Problem
from solvers.schedule import Bwd, Del, Loss, Run, Schedule, Step
from solvers.solve import Answer, Kind, Progress, Request, Solution, frontier, register, solve, solver_names
from solvers.text import format_bytes, format_schedule, parse_schedule
from solvers.walker import Walk, step_name, walk
from solvers.whole.graph import GraphNode, GraphProblem
from solvers.whole.walker import walk_graph

__all__ = [
    "Answer",
    "Backward",
    "Baseline",
    "Block",
    "Bwd",
    "ChainPlan",
    "ChainPlanner",
    "Data",
    "Del",
    "Frontier",
    "GraphNode",
    "GraphProblem",
    "Grid",
    "InfeasibleError",
    "Kind",
    "Loss",
    "Node",
    "Option",
    "Options",
    "Problem",
    "ProblemError",
    "Progress",
    "Request",
    "Run",
    "Schedule",
    "ScheduleError",
    "Solution",
    "SolvedViews",
    "SolverError",
    "SolverOptions",
    "Step",
    "Walk",
    "all_baselines",
    "block_options",
    "checkpoint_blocks",
    "chen_sqrt",
    "drop_useless_runs",
    "format_bytes",
    "format_problem",
    "format_schedule",
    "frontier",
    "improve",
    "keep_everything",
    "lower_bound",
    "parse_problem",
    "parse_schedule",
    "read_problem",
    "recompute_all",
    "register",
    "solve",
    "solve_chain",
    "solver_names",
    "step_name",
    "walk",
    "walk_graph",
    "with_deletes",
    "write_problem",
]
