"""`areal-lab deploy`: what it writes, prints and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.config.load import load_config

TOO_FEW = ("allocation_mode=sglang:d2+fsdp:d2", "--nodes", "1", "--gpus-per-node", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def deploy(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["deploy", *arguments])
    return result.exit_code, result.output


def test_files_their_purpose_and_the_next_commands_are_printed(folder: Path) -> None:
    code, said = deploy("slurm", "tiny", "eta=2", "--nodes", "2", "--time", "3", "--out", "here")
    assert code == 0
    assert "written  here/run.sbatch  the run under Slurm alone" in said
    assert "note: 2 machine(s) of 2 cores, " in said
    assert "    sbatch here/run.sbatch\n" in said
    assert load_config(folder / "here/config.yaml") == load_config("tiny", ["eta=2"])
    text = (folder / "here/run.sbatch").read_text()
    assert "# Written by: areal-lab deploy slurm tiny eta=2 --nodes 2 --time 3 --out here\n" in text
    assert "#SBATCH --time=3:00:00\n" in text


def test_options_may_be_given_as_settings_by_either_name(folder: Path) -> None:
    flags = ["--nodes", "2", "--time", "3", "--secret", "KEY", "--out", "here"]
    assert deploy("slurm", "tiny", "eta=2", *flags)[0] == 0
    written = (folder / "here/run.sbatch").read_text()
    for named in (["time=3", "secret=[KEY]"], ["time_h=3", "secrets=[KEY]"]):
        code, said = deploy("slurm", "tiny", "nodes=2", "eta=2", *named, "out=here")
        assert (code, said.count("unchanged")) == (0, 3)
    assert deploy("slurm", "tiny", "nodes=5", "eta=2", *flags)[0] == 0, "a flag goes over a setting"
    assert (folder / "here/run.sbatch").read_text() == written


def test_writing_again_changes_nothing_and_edits_are_kept(folder: Path) -> None:
    deploy("compose", "tiny")
    assert "unchanged  deploy/compose.yaml" in deploy("compose", "tiny")[1]
    assert "replaced  deploy/compose.yaml" in deploy("compose", "tiny", "--nodes", "2")[1]
    path = folder / "deploy/compose.yaml"
    path.write_text(path.read_text() + "# mine\n")
    code, said = deploy("compose", "tiny")
    assert (code, said.count("error:")) == (2, 1)
    assert "deploy/compose.yaml has been edited" in said
    assert deploy("compose", "tiny", "--force")[0] == 0
    assert "# mine" not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rayjobs", "tiny"], "KIND is 'rayjobs', but must be one of docker, compose, rayjob"),
        (["job"], "give a CONFIG (arithmetic, "),
        (["job", "tiny", "etta=2"], "did you mean 'eta'?"),
        (["job", "tiny", "dataset.path=/rows.jsonl"], "which is on this machine"),
        (["job", "tiny", "allocation_mode=megatron:p2"], "which is not supported"),
        (["job", "tiny", "nodes=0"], "nodes is 0, but must be an integer >= 1"),
        (["skypilot", "tiny", "--out", "../there"], "only the current folder is copied"),
        (
            ["job", "tiny", *TOO_FEW],
            "--nodes is 1, with 2 GPU(s) each, but 2 engines of 1 GPU each are asked for",
        ),
    ],
)
def test_wrong_command_lines_are_refused_and_nothing_is_written(
    arguments: list[str], message: str, folder: Path
) -> None:
    code, said = deploy(*arguments)
    assert code == 2
    assert message in " ".join(said.split())
    assert not list(folder.iterdir())


def test_secrets_are_asked_for_and_never_taken_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    code, said = deploy("rayjob", "tiny", "--secret", "HF_TOKEN")
    assert code == 0
    assert "--from-file=auth_token=/dev/stdin --from-file=HF_TOKEN=FILE_WITH_HF_TOKEN" in said
    assert "hush" not in said + "".join(file.read_text() for file in folder.glob("deploy/*"))


def test_what_the_image_or_the_machines_must_have_is_told() -> None:
    _, said = deploy("job", "tiny", "reward.fn=mine:score", "dataset.path=rows.jsonl", "eta=0")
    assert "note: reward.fn is in mine, which the image must have" in said
    assert "note: dataset.path is rows.jsonl, which the image must have below /work" in said
    _, said = deploy("compose", "tiny", "actor.path=my-model")
    assert "this memory is a guess, since my-model is not here" in said
