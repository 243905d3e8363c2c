"""Hosts brought up by a real Slurm cluster of three nodes on this machine."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_lab.cluster.hosts import TooFewHosts
from areal_lab.cluster.slurm import scheduler
from tests.cluster.host_lab import DEADLINE_S, start_sleeper, until
from tests.cluster.slurm.joined import joined, new_hosts
from tests.cluster.slurm.toy import GPUS, NODES, ToySlurm
from tests.cluster.slurm.toy import until as until_now
from tests.ended import gone

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[3]
SLEEP = ("--output=/dev/null", "--wrap=sleep 600")
QUICK = {"heartbeat_s": 0.2, "lost_after": 5, "lease_s": 3.0}


def test_three_hosts_join_from_one_job_and_nothing_is_left_of_it(
    slurm: ToySlurm, tmp_path: Path
) -> None:
    folder = tmp_path / "a run of 100%j"
    given = [f"--gres=gpu:{GPUS}", "--comment=three of them", "--mem-per-cpu=100"]

    async def run() -> None:
        async with joined(folder, 3, slurm_args=given) as made:
            assert [host.name for host in made.hosts.working] == list(NODES)
            sleeper = await start_sleeper(made.hosts.working[1])
            assert psutil.Process(sleeper.pid).environ()["SLURMD_NODENAME"] == "n2"
            [job] = slurm.jobs()
            assert slurm.command("squeue", "-h", "--format=%k") == "three of them\n"
            assert (await made.scheduler.state()).startswith(f"Slurm job {job}: RUNNING on n[1-3]")
            assert made.waited[0] == "starting 3 hosts"
            assert made.waited[1].startswith("waiting for hosts (0 of 3 hosts have joined; Slurm")
            assert len(slurm.agents()) == 3
            for agent in slurm.agents():
                assert agent.environ()["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
                assert made.hosts.token not in " ".join(agent.cmdline())
        assert gone(sleeper.pid)
        assert not slurm.jobs()
        kept = (folder / "slurm" / "hosts.sh").read_text()
        assert "#SBATCH --nodes=3" in kept
        assert "#SBATCH --gres=gpu:4" in kept
        assert {file.name for file in (folder / "logs").iterdir()} == {
            *(f"host-{node}.log" for node in NODES),
            f"slurm-{job}.log",
        }
        for file in (path for path in folder.rglob("*") if path.is_file()):
            assert made.hosts.token not in file.read_text()

    asyncio.run(run())


def test_a_node_that_hangs_without_its_slurmd_is_lost_and_replaced_by_another_job(
    slurm: ToySlurm, tmp_path: Path
) -> None:
    async def run() -> None:
        async with joined(tmp_path, 2, slurm_jobs="per_host", **QUICK) as made:
            first, second = made.hosts.working
            assert len(slurm.jobs()) == 2
            sleeper, other = await start_sleeper(first), await start_sleeper(second)
            agent = slurm.agent_on(first.name)
            slurm.kill_node(first.name)
            agent.send_signal(signal.SIGSTOP)
            assert "did not reply to 5 heartbeats" in str(await sleeper.died())
            after = await made.hosts.host_in(first.name)
            assert after.name == "n3"
            assert (await start_sleeper(after)).running
            assert other.running
            agent.send_signal(signal.SIGCONT)
            await until(lambda: gone(sleeper.pid), "its processes end with its lease")
            await until(lambda: bool(made.hosts.spares), "it joins again, without a seat")
            [spare] = made.hosts.spares
            assert spare.name == first.name
            assert spare.facts.incarnation != first.facts.incarnation
            slurm.start_node(first.name)
            await until(lambda: gone(agent.pid), "Slurm ends what was cancelled meanwhile")

    asyncio.run(run())


@pytest.mark.parametrize("slurmd", ["lives", "killed"])
def test_one_job_continues_on_the_other_nodes(slurm: ToySlurm, tmp_path: Path, slurmd: str) -> None:
    async def run() -> None:
        async with joined(tmp_path, 3, **QUICK) as made:
            sleepers = [await start_sleeper(host) for host in made.hosts.working]
            agent = slurm.agent_on("n2")
            if slurmd == "killed":
                slurm.kill_node("n2")
            agent.kill()
            assert "is lost with its host" in str(await sleepers[1].died())
            await until(lambda: gone(sleepers[1].pid), "its processes have ended")
            if slurmd == "killed":
                await until(lambda: any("no host could be" in s for s in made.said), "it says so")
                [why] = [said for said in made.said if "no host could be" in said]
                assert "has no node for it (n2: " in why
                assert "scheduler.slurm_jobs=per_host" in why
                await until(
                    lambda: slurm.command("squeue", "-h", "--format=%T %N") == "RUNNING n[1,3]\n",
                    "Slurm takes the node out of the job, which continues",
                )
            else:
                after = await made.hosts.host_in("n2")
                assert after.name == "n2"
                assert (await start_sleeper(after)).running
            assert [sleeper.running for sleeper in sleepers] == [True, False, True]
            assert len(slurm.jobs()) == 1

    asyncio.run(run())


def test_a_hung_agent_is_ended_before_another_one_starts_on_its_node(
    slurm: ToySlurm, tmp_path: Path
) -> None:
    async def run() -> None:
        async with joined(tmp_path, 3, **QUICK) as made:
            sleeper = await start_sleeper(made.hosts.working[0])
            agent = slurm.agent_on("n1")
            agent.send_signal(signal.SIGSTOP)
            assert "is lost with its host" in str(await sleeper.died())
            after = await made.hosts.host_in("n1")
            assert after.name == "n1"
            assert gone(agent.pid)
            assert gone(sleeper.pid)

    asyncio.run(run())


def test_a_job_that_slurm_cannot_end_is_told(
    slurm: ToySlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_GONE_WITHIN_S", 3.0)

    async def run() -> None:
        async with joined(tmp_path, 2, lease_s=2.0) as made:
            agents = slurm.agents()
            slurm.kill_node("n2")
        [waited, left] = made.said[-2:]
        assert waited.startswith("waiting until Slurm has ended job ")
        assert "COMPLETING" in waited
        assert "still, 3 s after scancel: one of its nodes does not respond" in left
        assert all(gone(agent.pid) for agent in agents)  # the run has dismissed them

    asyncio.run(run())
    slurm.start_node("n2")
    until_now(lambda: not slurm.jobs(), "Slurm ends the job when the node is back")


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_run_in_an_allocation_starts_its_hosts_there(
    slurm: ToySlurm, tmp_path: Path, nodes: int
) -> None:
    run = [sys.executable, "-m", "tests.cluster.slurm.joined", str(tmp_path), "2"]
    script = f"#!/bin/bash\ncd {ROOT}\n{' '.join(run)} >{tmp_path}/run.log 2>&1\n"
    (tmp_path / "run.sh").write_text(script)
    options = [f"--nodes={nodes}", "--exclusive", "--gres=gpu:2", f"--output={tmp_path}/batch.log"]
    job = slurm.command("sbatch", "--parsable", *options, f"{tmp_path}/run.sh").strip()

    async def wait() -> None:
        await until(lambda: not slurm.jobs(), "the job is over")

    asyncio.run(wait())
    log = (tmp_path / "run.log").read_text()
    assert (tmp_path / "seen.json").exists(), log
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["names"] == ["n1", "n2"]
    assert seen["gpus"] == ["0,1"] * 2
    assert seen["replaced_by"] == ("n3" if nodes == 3 else "n1")
    assert seen["running"] == [False, True]
    assert seen["state"].startswith(f"Slurm job {job}: agents start on n")
    assert not (tmp_path / "slurm").exists()  # nothing was submitted


def test_a_run_that_is_interrupted_while_its_job_is_pending_cancels_it(
    slurm: ToySlurm, tmp_path: Path
) -> None:
    blocking = slurm.command("sbatch", "--parsable", "-N3", "--exclusive", *SLEEP).strip()

    async def run() -> None:
        made = new_hosts(tmp_path, 2)
        starting = asyncio.create_task(made.hosts.start())
        await until(lambda: bool(made.waited), "it waits")
        await until(lambda: " PENDING (" in made.waited[-1], "it shows the state of the job")
        assert len(slurm.jobs()) == 2
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await made.hosts.close()
        assert slurm.jobs() == [blocking]

    asyncio.run(run())
    slurm.cancel(blocking)


def test_agents_end_when_their_run_is_killed(slurm: ToySlurm, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.cluster.slurm.joined import joined\n"
        "async def run():\n"
        "    async with joined(Path(sys.argv[1]), 3, lease_s=1.0):\n"
        "        print('joined', flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(run())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"joined\n"
        agents = slurm.agents()
        assert len(agents) == 3
        run.kill()

    async def wait() -> None:
        await until(lambda: all(gone(agent.pid) for agent in agents), "the agents end")
        await until(lambda: not slurm.jobs(), "their job is over")

    asyncio.run(wait())


@pytest.mark.parametrize(
    ("count", "settings", "says"),
    [
        (2, {"slurm_args": ["--partition=nowhere"]}, r"invalid partition specified: nowhere.*"),
        (2, {"n_gpus_per_node": 8}, r"2 hosts with 8 GPUs each \(.*node configuration is not "),
        (2, {"slurm_args": ["--nodes=3"]}, r"slurm_args has --nodes=3, but that follows from"),
    ],
)
def test_what_slurm_refuses_is_one_sentence_with_what_there_is(
    slurm: ToySlurm, tmp_path: Path, count: int, settings: dict[str, object], says: str
) -> None:
    async def run() -> None:
        made = new_hosts(tmp_path, count, **settings)  # type: ignore[arg-type]
        try:
            with pytest.raises(ValueError, match=says) as refused:
                await made.hosts.start()
            if "slurm_args has" not in says:
                assert "partition all has 3 nodes of 4 cores and gpu:4" in str(refused.value)
                assert "scheduler.slurm_args" in str(refused.value)
        finally:
            await made.hosts.close()

    asyncio.run(run())
    assert not slurm.jobs()


@pytest.mark.parametrize(
    ("count", "settings", "says"),
    [
        (9, {}, "PENDING (PartitionConfig), and so will never start; partition all has 3 nodes"),
        (2, {"slurm_args": ["--partition=small"]}, "and so will never start"),
        (2, {"slurm_args": ["--chdir=/", "--time=1", "--begin=now+1hour"]}, "BeginTime"),
    ],
)
def test_a_job_that_does_not_start_is_told_with_its_reason(
    slurm: ToySlurm, tmp_path: Path, count: int, settings: dict[str, object], says: str
) -> None:
    async def run() -> None:
        timeout_s = 3.0 if says == "BeginTime" else DEADLINE_S
        made = new_hosts(tmp_path, count, start_timeout_s=timeout_s, **settings)  # type: ignore[arg-type]
        try:
            with pytest.raises(TooFewHosts) as failed:
                await made.hosts.start()
            assert says in str(failed.value)
            assert f"cluster.n_nodes is {count}, but 0 of {count} hosts" in str(failed.value)
        finally:
            await made.hosts.close()

    asyncio.run(run())
    assert not slurm.jobs()


def test_an_allocation_that_is_too_small_is_told_with_its_nodes(
    slurm: ToySlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = slurm.command("sbatch", "--parsable", "-N2", *SLEEP).strip()

    async def run() -> None:
        await until(lambda: "R" in slurm.command("squeue", "-h", "--format=%t"), "it runs")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        made = new_hosts(tmp_path, 3)
        with pytest.raises(ValueError, match=rf"is 3, but .*Slurm job {job}\) has 2: n1, n2; "):
            await made.hosts.start()
        await made.hosts.close()

    asyncio.run(run())
    slurm.cancel(job)


def test_an_allocation_with_too_few_gpus_is_told_with_what_srun_said(
    slurm: ToySlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = slurm.command("sbatch", "--parsable", "-N2", "--gres=gpu:2", *SLEEP).strip()

    async def run() -> None:
        await until(lambda: "R" in slurm.command("squeue", "-h", "--format=%t"), "it runs")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        made = new_hosts(tmp_path, 2, n_gpus_per_node=3)
        with pytest.raises(TooFewHosts, match=rf"Slurm job {job} has no agent on n[12]: ") as why:
            await made.hosts.start()
        assert "Invalid generic resource (gres) specification" in str(why.value)
        await made.hosts.close()

    asyncio.run(run())
    slurm.cancel(job)


def test_agents_that_cannot_start_are_told_with_what_slurm_printed(
    slurm: ToySlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def run() -> None:
        made = new_hosts(tmp_path, 2)
        try:
            with pytest.raises(TooFewHosts, match=r"Slurm job \d+: (COMPLETED|FAILED)"):
                await made.hosts.start()
        finally:
            await made.hosts.close()

    asyncio.run(run())
    assert not slurm.jobs()
