"""Simulate a cluster under asynchronous reinforcement learning.

    config = simulator.SimulationConfig(model="R1-Distill-Qwen-1.5B")
    result = simulator.simulate(config)          one seed: rows per step, shares of time, lags
    many = simulator.replicate(config)           all seeds: 95 % intervals
    plan = simulator.find_plan(simulator.load_plan("plan.yaml"))    which cluster to rent
    fitted = simulator.calibrate_from(Path("run"))                  costs of a recorded run
    lengths = simulator.fit_lengths("lengths.csv")                  your response lengths

Names are loaded on first use; none of them loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.runlog.read_run import read_run as read_run
    from simulator.assembly.build import check_config as check_config
    from simulator.assembly.build import problems as problems
    from simulator.assembly.simulate import build as build
    from simulator.assembly.simulate import replicate as replicate
    from simulator.assembly.simulate import simulate as simulate
    from simulator.assembly.simulate import simulated_log as simulated_log
    from simulator.calibrate.fit_run import Calibration as Calibration
    from simulator.calibrate.fit_run import calibrate_from as calibrate_from
    from simulator.calibrate.length_fit import LengthFit as LengthFit
    from simulator.calibrate.lengths import fit_lengths as fit_lengths
    from simulator.calibrate.replay import Replay as Replay
    from simulator.calibrate.replay import replay as replay
    from simulator.catalogue.gpu import GPU as GPU
    from simulator.catalogue.gpu import GPUS as GPUS
    from simulator.catalogue.gpu import find_gpu as find_gpu
    from simulator.catalogue.models import MODELS as MODELS
    from simulator.catalogue.models import ModelShape as ModelShape
    from simulator.catalogue.models import find_model as find_model
    from simulator.config.load import load_simulation as load_simulation
    from simulator.config.load import presets as presets
    from simulator.config.schema import SimulationConfig as SimulationConfig
    from simulator.plan.frame import plan_csv as plan_csv
    from simulator.plan.frame import plan_frame as plan_frame
    from simulator.plan.frame import plan_rows as plan_rows
    from simulator.plan.plots import draw_front as draw_front
    from simulator.plan.plots import draw_tornado as draw_tornado
    from simulator.plan.result import Outcome as Outcome
    from simulator.plan.result import Plan as Plan
    from simulator.plan.schema import PlanConfig as PlanConfig
    from simulator.plan.schema import PriceEntry as PriceEntry
    from simulator.plan.schema import check_plan as check_plan
    from simulator.plan.schema import load_plan as load_plan
    from simulator.plan.schema import plan_yaml as plan_yaml
    from simulator.plan.search import PlanSearch as PlanSearch
    from simulator.plan.search import find_plan as find_plan
    from simulator.plan.summary import model_error_lines as model_error_lines
    from simulator.plan.summary import question_lines as question_lines
    from simulator.plan.summary import recommendation_lines as recommendation_lines
    from simulator.plan.summary import sensitivity_lines as sensitivity_lines
    from simulator.plan.trial import TrialCache as TrialCache
    from simulator.plan.trial import shipped_trials as shipped_trials
    from simulator.plan.trial import workers as workers
    from simulator.run.one_seed import run_system as run_system
    from simulator.run.result import Replicated as Replicated
    from simulator.run.result import SimulationResult as SimulationResult
    from simulator.run.system import System as System
    from simulator.stats.statistics import Estimate as Estimate
    from simulator.stats.statistics import estimate as estimate
    from simulator.workload.trace_lengths import traces as traces

_HOMES = {
    # simulate
    "SimulationConfig": "simulator.config.schema",
    "simulate": "simulator.assembly.simulate",
    "simulated_log": "simulator.assembly.simulate",
    "replicate": "simulator.assembly.simulate",
    "SimulationResult": "simulator.run.result",
    "Replicated": "simulator.run.result",
    "Estimate": "simulator.stats.statistics",
    "estimate": "simulator.stats.statistics",
    "load_simulation": "simulator.config.load",
    "presets": "simulator.config.load",
    # plan
    "find_plan": "simulator.plan.search",
    "PlanSearch": "simulator.plan.search",
    "plan_frame": "simulator.plan.frame",
    "plan_csv": "simulator.plan.frame",
    "plan_rows": "simulator.plan.frame",
    "draw_front": "simulator.plan.plots",
    "draw_tornado": "simulator.plan.plots",
    "model_error_lines": "simulator.plan.summary",
    "question_lines": "simulator.plan.summary",
    "recommendation_lines": "simulator.plan.summary",
    "sensitivity_lines": "simulator.plan.summary",
    "TrialCache": "simulator.plan.trial",
    "shipped_trials": "simulator.plan.trial",
    "load_plan": "simulator.plan.schema",
    "plan_yaml": "simulator.plan.schema",
    "workers": "simulator.plan.trial",
    "PlanConfig": "simulator.plan.schema",
    "PriceEntry": "simulator.plan.schema",
    "check_plan": "simulator.plan.schema",
    "Plan": "simulator.plan.result",
    "Outcome": "simulator.plan.result",
    # calibrate, and replay a recorded run
    "calibrate_from": "simulator.calibrate.fit_run",
    "Calibration": "simulator.calibrate.fit_run",
    "read_run": "areal_lab.runlog.read_run",
    "replay": "simulator.calibrate.replay",
    "Replay": "simulator.calibrate.replay",
    # response lengths
    "fit_lengths": "simulator.calibrate.lengths",
    "LengthFit": "simulator.calibrate.length_fit",
    "traces": "simulator.workload.trace_lengths",
    # check and build
    "check_config": "simulator.assembly.build",
    "problems": "simulator.assembly.build",
    "build": "simulator.assembly.simulate",
    "System": "simulator.run.system",
    "run_system": "simulator.run.one_seed",
    # hardware and models
    "GPU": "simulator.catalogue.gpu",
    "GPUS": "simulator.catalogue.gpu",
    "find_gpu": "simulator.catalogue.gpu",
    "MODELS": "simulator.catalogue.models",
    "ModelShape": "simulator.catalogue.models",
    "find_model": "simulator.catalogue.models",
}

__all__ = [  # noqa: PLE0604 - the table above is the one list of names
    *_HOMES
]


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """All public names, whether loaded or not."""
    return sorted(_HOMES)
