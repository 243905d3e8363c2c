"""RayJobs against KubeRay's schema without room for unknown keys, and mistakes that it finds."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from areal_lab.cluster.deploy.kinds import DeployKind
from areal_lab.config.shipped import training_configs
from tests.cluster.deploy.asked import FOUR_NODES, documents, files_of

SCHEMA = Path(__file__).with_name("validators") / "rayjob-v1-strict.schema.json.gz"


@pytest.fixture(scope="module")
def strict() -> Draft7Validator:
    return Draft7Validator(json.loads(gzip.decompress(SCHEMA.read_bytes())))


def rayjob(*config: str, **options: Any) -> dict[str, Any]:
    text = files_of(DeployKind.RAYJOB, config, **options)["rayjob.yaml"]
    found: dict[str, Any] = documents(text)["RayJob"]
    return found


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("name", sorted(training_configs().keys() - {"gsm8k"}))
def test_every_shipped_config_gives_a_valid_rayjob(
    name: str, nodes: int, strict: Draft7Validator
) -> None:
    strict.validate(rayjob(name, nodes=nodes))


def test_one_with_gpus_mounts_and_secrets_is_valid(strict: Draft7Validator) -> None:
    strict.validate(rayjob(*FOUR_NODES, gpus_per_node=4, mounts=["a:/a"], secrets=["HF_TOKEN"]))


def misspelled(job: dict[str, Any]) -> None:
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    group["minReplica"] = 1


def no_template(job: dict[str, Any]) -> None:
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]


def text_for_a_bool(job: dict[str, Any]) -> None:
    job["spec"]["shutdownAfterJobFinishes"] = "true"


def number_for_text(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def unknown_mode(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "tokens"


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (misspelled, "'minReplica' was unexpected"),
        (no_template, "'template' is a required property"),
        (text_for_a_bool, "'true' is not of type 'boolean'"),
        (number_for_text, "0 is not of type 'string'"),
        (unknown_mode, "'tokens' is not one of"),
    ],
)
def test_a_planted_mistake_is_found(
    plant: Callable[[dict[str, Any]], None], found: str, strict: Draft7Validator
) -> None:
    job = copy.deepcopy(rayjob("tiny", nodes=3))
    plant(job)
    messages = [error.message for error in strict.iter_errors(job)]
    assert len(messages) == 1
    assert found in messages[0]
