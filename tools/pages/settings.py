"""`docs/settings.md`: every setting of a command but `simulate`.

Those of `simulate`, which are also `base` of a plan, are in `docs/simulator.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from areal_lab.cluster.deploy.request import ALIASES as DEPLOY_ALIASES
from areal_lab.cluster.deploy.request import DeployConfig
from areal_lab.config.dump import markdown_tables
from areal_lab.config.load import ALIASES
from areal_lab.config.offline import ALIASES as OFFLINE_ALIASES
from areal_lab.config.offline import DPOConfig, OfflineConfig, RewardModelConfig, SFTConfig
from areal_lab.config.schema import TrainConfig
from areal_lab.config.serving import GATEWAY_ALIASES, GatewayConfig, ServeConfig
from areal_lab.sweep.study import StudyConfig
from cosim.load import ALIASES as COSIM_ALIASES
from cosim.schema import CosimConfig
from simulator.plan.schema import ALIASES as PLAN_ALIASES
from simulator.plan.schema import PlanConfig

PAGE: Final = Path(__file__).parents[2] / "docs" / "settings.md"
_HEAD: Final = """# Settings

A command takes a YAML file and `a.b=c` overrides:

    areal-lab train configs/arithmetic.yaml eta=0

An override wins over the file, and the file over the defaults below. Values are YAML; `inf` is
infinity, `null` leaves a value to the program. A file may refer to its own settings:
`run_dir: runs/${experiment_name}`, but not to environment variables. A setting that was given and
that nothing reads is refused if it names data, a model, a reward or a loss, and noted before the
start (and by `areal-lab doctor --config`) if not. Values that are not allowed are refused before
anything starts, all of them at once, in one line each.

In Python the same records are `areal_lab.TrainConfig`, `cosim.schema.CosimConfig`,
`simulator.SimulationConfig` and `simulator.PlanConfig`. `config.gconfig.n_samples = 4` assigns and
checks; `config.with_settings({"gconfig.n_samples": 4})` returns a changed copy.
"""

_COSIM_NAMES: Final = {k: v for k, v in COSIM_ALIASES.items() if k not in ALIASES}


def shared(record: type[OfflineConfig]) -> tuple[str, ...]:
    """What the commands on fixed data have in common: all but their data, and the name."""
    return tuple(name for name in record.model_fields if name in OfflineConfig.model_fields)


def page() -> str:
    """The page as it should be."""
    parts = [
        _HEAD,
        "## areal-lab train",
        markdown_tables(TrainConfig, ALIASES),
        "## areal-lab sft",
        "[SFT, reward models, DPO](offline.md) says how; `stats_logger` is that of "
        "`areal-lab train`.",
        markdown_tables(SFTConfig, OFFLINE_ALIASES, without=("stats_logger",)),
        "## areal-lab rm",
        "All settings of `areal-lab sft` but `train_on` and those of `dataset`, and these.",
        markdown_tables(RewardModelConfig, {}, without=shared(RewardModelConfig)),
        "## areal-lab dpo",
        "All settings of `areal-lab sft` but `train_on` and those of `dataset`, and these.",
        markdown_tables(DPOConfig, {}, without=shared(DPOConfig)),
        "## areal-lab cosim",
        "All settings of `areal-lab train`, and these.",
        markdown_tables(CosimConfig, _COSIM_NAMES, without=tuple(TrainConfig.model_fields)),
        "## areal-lab plan",
        "`base` has the settings of [areal-lab simulate](simulator.md).",
        markdown_tables(PlanConfig, PLAN_ALIASES, without=("base",)),
        "## areal-lab sweep",
        "`settings` and `grid` have the settings of the command that is swept; [Sweep a grid of "
        "settings](sweep.md) says how.",
        markdown_tables(StudyConfig, {}),
        "## areal-lab gateway",
        "Options of the command, as `--port 30100` or `port=30100`, besides `gconfig` and "
        "`rollout` of `areal-lab train`. [Agents](agents.md) says how.",
        markdown_tables(GatewayConfig, GATEWAY_ALIASES),
        "## areal-lab deploy",
        "Options of the command, as `--nodes 2` or `nodes=2`, besides the settings of "
        "`areal-lab train`. [Start a run elsewhere](deploy.md) says how.",
        markdown_tables(DeployConfig, DEPLOY_ALIASES),
        "## areal-lab engine serve",
        "Options of the command, as `--port 30000` or `port=30000`.",
        markdown_tables(ServeConfig, {}),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"
