"""What is submitted: options that settings decide, and those that are given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from areal_lab.cluster.slurm.commands import Job
from areal_lab.cluster.slurm.script import batch_script, refused_option, step_command
from areal_lab.config.sections import ClusterConfig

RUN = "10.0.0.1:6380"


def script(*extra: str, gpus: int = 0) -> str:
    return batch_script(2, RUN, ClusterConfig(n_gpus_per_node=gpus), extra, Path("/runs/it's one"))


@pytest.mark.parametrize("extra", [(), ("--gres=gpu:a100:4",), ("--comment=it's $HOME",)])
def test_a_script_is_one_that_a_shell_reads(extra: tuple[str, ...]) -> None:
    subprocess.run(["bash", "-n"], input=script(*extra), text=True, check=True)


@pytest.mark.parametrize("given", ["--gres=gpu:a100:4", "--gpus-per-node=4", "--gpus=8"])
def test_gpus_are_asked_for_once(given: str) -> None:
    cluster = ClusterConfig(n_gpus_per_node=4)
    assert script(gpus=4).count("--gres=gpu:4") == 2  # of the job, and of each step
    assert "--gres=gpu:4 " in f"{' '.join(step_command('7', 'n1', RUN, cluster, []))} "
    assert "--gres=gpu:4" not in script(given, gpus=4)
    assert "--gres=gpu:4" not in step_command("7", "n1", RUN, cluster, [given])
    assert "--gres" not in script()


def test_memory_is_that_of_the_node_unless_it_is_given() -> None:
    assert "#SBATCH --mem=0" in script()
    assert "#SBATCH --mem=0" not in script("--mem-per-cpu=4G")


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        (["--partition=gpu", "--nodes=3"], "--nodes=3"),
        (["--nodes", "3"], "--nodes"),
        (["-N3"], "-N3"),
        (["--export=NONE"], "--export=NONE"),
        (["--nodelist=n1"], "--nodelist=n1"),
        (["--nodefile=nodes", "-pgpu", "--ntasks-per-core=1", "--no-kill"], ""),
    ],
)
def test_options_that_follow_from_other_settings_are_refused(
    extra: list[str], refused: str
) -> None:
    assert refused_option(extra) == refused


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job("12", "PENDING", "Resources", ""), "12: PENDING (Resources)"),
        (Job("12", "RUNNING", "None", "n[1-3]"), "12: RUNNING on n[1-3]"),
        (Job("12", "FAILED", "NonZeroExitCode", "n1"), "12: FAILED (NonZeroExitCode)"),
    ],
)
def test_a_job_is_told_with_its_state_and_reason(job: Job, text: str) -> None:
    assert str(job) == text
