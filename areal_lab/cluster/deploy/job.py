"""An Indexed Job of Kubernetes: no operator, pod 0 is the controller, the others join it."""

from __future__ import annotations

import shlex
from typing import Any, Final

from areal_lab.cluster.deploy.files import File, read_yaml_text, yaml_text
from areal_lab.cluster.deploy.kubernetes import (
    check_references,
    config_map,
    labels,
    pod,
    secret_commands,
    storage_file,
)
from areal_lab.cluster.deploy.request import (
    CONFIG_PATH,
    Request,
    head_of,
    host_command,
    train_command,
)
from areal_lab.cluster.deploy.scripts import RUN_FAILED, indexed_script

_HOST_RETRIES: Final = 3
"""How often a pod that failed is replaced; the run continues on the others meanwhile."""
_JOB_LABEL: Final = "batch.kubernetes.io/job-name"


def job_files(request: Request) -> list[File]:
    """The Job with its config and Service, and storage."""
    storage = storage_file(request)
    # A headless Service gives pods stable names; before they are ready, as the controller is none
    # of the Service's servers.
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name, "labels": labels(request)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_JOB_LABEL: request.name},
        },
    }
    documents = [config_map(request, script=_script(request)), service, _policy(request)]
    documents.append(_job(request))
    head = head_of(request, "A run on pods of an Indexed Job: pod 0 is the controller.")
    text = yaml_text(*documents, head=head)
    read = [*read_yaml_text(storage.text), *read_yaml_text(text)]
    check_references(read, request)
    return [storage, File("job.yaml", text, "the run as an Indexed Job")]


def _script(request: Request) -> str:
    train = train_command(request, CONFIG_PATH, "manual")
    return indexed_script(train, host_command(f"{request.name}-0.{request.name}", request))


def _policy(request: Request) -> dict[str, Any]:
    """Only pods of the job reach its pods: tokens and weights are sent without encryption."""
    own = {"matchLabels": {_JOB_LABEL: request.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": request.name, "labels": labels(request)},
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def _job(request: Request) -> dict[str, Any]:
    container = {"name": "areal-lab", "args": ["/bin/sh", "/etc/areal_lab/start.sh"]}
    spec = pod(request, container, request.machine)
    nodes = request.shape.n_nodes
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": request.name, "labels": labels(request)},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": _HOST_RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": "areal-lab",
                            "operator": "In",
                            "values": [RUN_FAILED],
                        },
                    },
                    # A pod that was moved off its node counts as no failure.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                ]
            },
            # The run has ended when the controller has, whatever hosts do.
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "template": {
                "metadata": {"labels": labels(request)},
                "spec": {"restartPolicy": "Never", "subdomain": request.name, **spec},
            },
        },
    }


def job_commands(request: Request, folder: str) -> list[str]:
    """Commands that start the run, follow it and end it."""
    storage, job = (shlex.quote(f"{folder}/{name}") for name in ("storage.yaml", "job.yaml"))
    return [
        *secret_commands(request, token=request.token),
        f"kubectl apply --filename {storage} --filename {job}",
        f"kubectl logs --follow --selector batch.kubernetes.io/job-name={request.name},"
        "batch.kubernetes.io/job-completion-index=0",
        f"kubectl delete --filename {job}    # keeps the claim with the runs",
    ]
