"""`areal-lab engine` and `doctor --config`: what they print, refuse and return."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from areal_lab.cli import doctor
from areal_lab.cli.doctor import Status
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.engines.client.addresses import port_of
from areal_lab.engines.keys import KEY_VARIABLE, authorization, key_file, key_for
from areal_lab.engines.launch.backends import INSTALLABLE, Build
from areal_lab.engines.launch.environments import Condition, Environment
from areal_lab.engines.weights.folder import write_weights
from areal_lab.pipeline.servers.sources import attach
from areal_lab.resolve import placement
from areal_lab.resolve.resolved import resolve
from tests.engines.tiny import tiny_model

BOUND_S = 60.0
CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"


@pytest.fixture(autouse=True)
def no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path / "engines"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_list_names_every_engine_and_its_state() -> None:
    result = call("engine", "list")
    assert result.exit_code == 0
    assert re.search(r"embedded +ready", result.stdout)
    assert re.search(r"sglang +not installed .*engines/sglang", result.stdout)


def test_a_dry_run_describes_and_changes_nothing(tmp_path: Path) -> None:
    result = call("engine", "install", "vllm", "--build", "cpu", "--dry-run")
    assert result.exit_code == 0
    assert "vllm: CPU build, because it was requested" in result.stdout
    assert "GiB on disk" in result.stdout
    assert result.stdout.endswith("dry run: nothing was changed\n")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("install", "sglan"), f"known are {', '.join(INSTALLABLE)}; did you mean 'sglang'?"),
        (("install", "embedded"), "engine embedded is part of this package"),
        (("install", "sglang", "--build", "tpu"), "--build is 'tpu', but must be cpu or gpu"),
        (("serve", "sglang"), "run: areal-lab engine install sglang"),
        (
            ("serve", "embedded", "--host", "nonsense.invalid", "--port", "0"),
            "--host is 'nonsense.invalid', but must be an address of this machine, such as 127",
        ),
        (("serve", "embedded", "--host", "192.0.2.1"), "(cannot assign requested address)"),
        (("serve", "embedded", "--host", ".."), "--host is '..', but must be an address of this"),
        (
            ("serve", "embedded", "--device", "gpu"),
            "--device is 'gpu', but must be auto, cpu or cuda",
        ),
        (("serve", "embedd"), "did you mean 'embedded'?"),
        (("serve", "embedded", "--model-path", "nowhere"), "nowhere is neither a model folder"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    result = call("engine", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [("--dry-run",), ("--force", "--dry-run"), ()])
def test_a_parent_that_is_not_a_folder_is_refused_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path / "file"))
    result = call("engine", "install", "sglang", "--build", "cpu", *more)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {tmp_path}/file/sglang cannot be created, as {tmp_path}/file is not a folder; set "
        "AREAL_LAB_ENGINES to another folder\n"
    )
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path / ("n" * 300)))
    result = call("engine", "install", "sglang", "--build", "cpu", *more)
    assert result.exit_code == 2
    assert "AREAL_LAB_ENGINES is '" in result.stderr
    assert "has at most 4095 bytes, and 255 between slashes" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ("engine", "list"),
        ("engine", "install", "sglang", "--build", "cpu", "--dry-run"),
        ("engine", "serve", "sglang"),
        ("doctor",),
        ("train", str(CONFIG), "rollout.backend=sglang"),
    ],
    ids=" ".join,
)
def test_the_home_folder_of_an_unknown_user_is_one_line(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AREAL_LAB_ENGINES", "~nosuchuser/engines")
    result = call(*command)
    assert result.exit_code == 2
    assert result.stderr == (
        "error: AREAL_LAB_ENGINES is ~nosuchuser/engines, but no home folder is known for "
        "~nosuchuser; write the full path\n"
    )


async def key_of_attached(address: str, model: Path) -> str:
    """The key that a run attached to this server would send."""
    client = await attach(address, model, request_timeout_s=BOUND_S, ready_timeout_s=BOUND_S)
    await client.close()
    return client.key


def test_serve_runs_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is in a file that only its user can read, as long as it runs, and nowhere else."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    model = write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32).path
    arguments = ["serve", "embedded", "--model-path", str(model), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "areal_lab.cli.app", "engine", *arguments, "--weight-version", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        first = serving.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert address is not None, serving.stderr.read()
        assert f"'rollout.addresses=[\"{address.group()}\"]'" in serving.stdout.readline()
        file = key_file(port_of(address.group()))
        assert f"its key is in {file}, where runs on this machine find it" in (
            serving.stdout.readline()
        )
        assert file.stat().st_mode & 0o777 == 0o600
        key = key_for(port_of(address.group()))
        info = httpx2.get(
            f"{address.group()}/model_info", headers=authorization(key), trust_env=False
        )
        assert info.json()["weight_version"] == "5"
        assert asyncio.run(key_of_attached(address.group(), model)) == key
        for process in (serving.pid, int(child_of(serving.pid))):
            assert key.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        pidfd = os.pidfd_open(int(child_of(serving.pid)))
        serving.send_signal(signal.SIGINT)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(BOUND_S * 1000)
        os.close(pidfd)
        assert serving.wait(BOUND_S) == 0
        said = serving.stderr.read()
        assert said.endswith("stopped\n")
        log = re.search(r"log: (\S+)", said)
        assert log is not None
        assert key not in said + first + serving.stdout.read() + Path(log.group(1)).read_text()
    assert not file.exists()


def test_adapters_need_a_server_that_supports_them(tmp_path: Path) -> None:
    model = str(write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32).path)
    result = call("engine", "serve", "embedded", "--model-path", model, "--lora-rank", "8")
    assert result.exit_code == 2
    assert (
        "--lora-rank is 8, but embedded does not support adapters, only sglang and vllm do"
        in result.stderr
    )
    result = call("engine", "serve", "vllm", "--model-path", model, "--lora-rank", "600")
    assert result.exit_code == 2
    assert "vllm supports adapters up to rank 512" in result.stderr
    file = Path(model) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    result = call("engine", "serve", "sglang", "--model-path", model, "--lora-rank", "8")
    assert result.exit_code == 2
    assert "model.safetensors is not a safetensors file: it has 100 bytes" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_server_that_dies_ends_serve_with_the_end_of_its_log(tmp_path: Path) -> None:
    from areal_lab.cli.engine import _serve_until_stopped
    from areal_lab.engines.client.engine_client import EngineClient
    from areal_lab.engines.launch.start import EngineProcess
    from areal_lab.host.processes import ChildDied, start_command

    async def scenario() -> None:
        async def launch() -> EngineProcess:
            command = [sys.executable, "-c", "raise SystemExit('out of memory')"]
            child = await start_command("engine 0", command, log_path=tmp_path / "log")
            url = "http://127.0.0.1:1"
            return EngineProcess(child=child, client=EngineClient(url), base_url=url)

        await _serve_until_stopped(launch, "model")

    with pytest.raises(ChildDied, match=r"engine 0 .* exited with 1; .*\n.*out of memory"):
        asyncio.run(scenario())


def child_of(parent: int) -> str:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]


def test_a_configuration_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {engines: 2}\n")
    result = call("doctor", "--config", str(file), "allocation_mode=embedded:d2+fsdp:d1")
    assert "A run with this config:\n    starts 2 x embedded" in result.stdout
    assert "is read as embedded:d2+fsdp:d1" in result.stdout
    result = call("doctor", "--json", "--config", str(file))
    assert json.loads(result.stdout)["plan"][1].startswith("engine 0: CPU")


def test_a_configuration_that_cannot_run_fails_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {backend: sglang}\n")
    result = call("doctor", "--config", str(file))
    assert result.exit_code == 1
    assert re.search(r"FAIL +configuration +rollout.backend is sglang, but", result.stdout)
    assert "configuration:\n    areal-lab engine install sglang" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("rollout.engines=2",),
            "'rollout.engines=2' overrides a setting, but there is no config; add --config FILE",
        ),
        (("--config", "nowhere.yaml"), "nowhere.yaml does not exist"),
    ],
)
def test_doctor_refuses_what_it_cannot_explain(arguments: tuple[str, ...], said: str) -> None:
    result = call("doctor", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def sglang(condition: Condition, build: Build = "cpu") -> Environment:
    return Environment(
        backend="sglang",
        folder=Path("/e"),
        condition=condition,
        version="0.5",
        build=build,
        missing="a.py is missing",
    )


@pytest.mark.parametrize(
    ("found", "gpus", "status", "detail", "fix"),
    [
        (sglang(Condition.MISSING), (), Status.OK, "not installed", ""),
        (sglang(Condition.READY), (), Status.OK, "0.5 (CPU build) in /e", ""),
        (sglang(Condition.MANUAL), (), Status.OK, "installed manually", ""),
        (sglang(Condition.INCOMPLETE), (), Status.NOTE, "incompletely", "install sglang"),
        (sglang(Condition.OUTDATED), (), Status.NOTE, "have changed", "install sglang"),
        (
            sglang(Condition.BROKEN),
            (),
            Status.NOTE,
            "but broken: a.py is missing",
            "install sglang",
        ),
        (sglang(Condition.READY, "gpu"), (), Status.NOTE, "no GPU is", "sglang --build cpu"),
        (sglang(Condition.READY, "gpu"), ("0",), Status.OK, "(GPU build)", ""),
    ],
)
def test_the_doctor_knows_the_state_of_an_engine(
    found: Environment, gpus: tuple[str, ...], status: Status, detail: str, fix: str
) -> None:
    finding = doctor.diagnose_engine(found, gpus)
    assert (finding.name, finding.status) == ("engine sglang", status)
    assert detail in finding.detail
    assert finding.fix.endswith(fix)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.ppo_n_minibatches=65"], "is 65, but a batch has only 8 groups"),
        (
            ["rollout.batch_order=bounded_lag", "rollout.max_lag=1.5", "eta=1.5"],
            "but eta 1.5 starts groups up to 2 versions ahead",
        ),
        (["rollout.port=65535", "rollout.engines=3"], "engine ports end at 65535"),
        (["rollout.engines=200000000"], "is 200000000, but "),
        (['rollout.addresses=["127.0.0.1:30000"]'], "but an address is http://HOST:PORT"),
        (['rollout.addresses=["http://127.0.0.1:1"]'], "nothing responds at http://127.0.0.1:1"),
        (["run_dir=/dev/null/runs"], "/dev/null is not a folder"),
    ],
)
def test_the_doctor_refuses_what_a_run_refuses(overrides: list[str], said: str) -> None:
    config = load_config(None, overrides)
    plan, (refusal,) = doctor.explain_config(config)
    assert plan == []
    assert refusal.status is Status.FAIL
    assert said in refusal.detail
    with pytest.raises(ConfigError) as raised:
        resolve(config)
    assert refusal.detail == str(raised.value)


def test_the_doctor_knows_how_an_engine_takes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    here = placement.this_machine()
    ready = replace(here.engines["vllm"], condition=Condition.READY, version="1.2")
    there = replace(here, engines={**here.engines, "vllm": ready})
    monkeypatch.setattr(placement, "this_machine", lambda: there)
    config = load_config(None, ["rollout.backend=vllm", "rollout.transfer=distributed"])
    _, (refusal,) = doctor.explain_config(config)
    assert "vllm supports folder, adapter only" in refusal.detail
    assert refusal.detail.endswith("set rollout.transfer=folder")


def test_the_doctor_says_what_it_does_not_check(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor: {path: nowhere}\n")
    result = call("doctor", "--config", str(file), "dataset.type=jsonl")
    assert "the dataset, functions and model are checked only when a run starts" in result.stdout


def test_the_command_line_loads_without_torch() -> None:
    program = "import sys, areal_lab.cli.app; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


def test_ctrl_c_before_the_server_is_ready_stops_it() -> None:
    from areal_lab.cli.engine import _serve_until_stopped

    ended = asyncio.Event()

    async def scenario() -> None:
        async def launch() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        await _serve_until_stopped(launch, "model")  # type: ignore[arg-type]  # it never returns a server

    asyncio.run(scenario())
    assert ended.is_set()
