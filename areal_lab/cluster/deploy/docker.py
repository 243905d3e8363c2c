"""Dockerfiles: one for CPUs, one for NVIDIA GPUs, which differ in their base and engine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from areal_lab.cluster.deploy.contents import RUNS, WORK
from areal_lab.cluster.deploy.files import File, comments
from areal_lab.cluster.deploy.request import RAY_VERSION, Build, Request, head_of

USER_ID: Final = 10001
"""The user of containers; above those that base images have."""
BASES: Final[dict[Build, str]] = {
    "cpu": "python:3.11.14-slim-bookworm",
    # SGLang and vLLM compile kernels when they start, which needs nvcc.
    "gpu": "nvidia/cuda:13.0.2-devel-ubuntu24.04",
}
_SYSTEM: Final[dict[Build, Sequence[str]]] = {
    "cpu": ("bubblewrap", "g++", "tini"),
    "gpu": ("bubblewrap", "g++", "python3-dev", "python3-venv", "tini"),
}
"""bubblewrap contains code of models; g++ is for torch.compile and engines; tini reaps processes
whose parents are gone."""
_SOURCES: Final = ("areal_lab", "cosim", "simulator")
_PIP: Final = "/opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt"


def docker_files(request: Request) -> list[File]:
    """Dockerfiles for CPUs and GPUs, and what they copy."""
    builds: tuple[Build, ...] = ("cpu", "gpu")
    files = [
        File(f"Dockerfile.{one}", dockerfile(request, one), f"the image for {one.upper()}s")
        for one in builds
    ]
    ignored = [
        File(f"Dockerfile.{one}.dockerignore", ignore_file(), "what the image is built from")
        for one in builds
    ]
    return [*files, *ignored]


def dockerfile(request: Request, build: Build) -> str:
    """A Dockerfile, to be built in a checkout.

    What changes seldom comes first: torch, then this package, then the engine.
    """
    extras = ",".join(request.extras)
    tools = [f"ray[default]=={RAY_VERSION}"] if request.with_ray else []
    lines = [
        f"FROM {BASES[build]}",
        "",
        "# Unpinned: Debian and Ubuntu remove older versions from their archives.",
        "# hadolint ignore=DL3008",
        "RUN apt-get update \\",
        f"    && apt-get install --yes --no-install-recommends {' '.join(_SYSTEM[build])} \\",
        "    && rm -rf /var/lib/apt/lists/*",
        "",
        "# For torch without CUDA: --build-arg PIP_EXTRA_INDEX_URL=(PyTorch's index of CPU wheels)",
        'ARG PIP_EXTRA_INDEX_URL=""',
        "WORKDIR /opt/areal_lab",
        "COPY constraints.txt ./",
        "RUN python3 -m venv /opt/venv \\",
        f"    && {_PIP} torch",
        "",
        "COPY pyproject.toml README.md LICENSE ./",
        *(f"COPY {source} {source}" for source in _SOURCES),
        f"RUN {_PIP} {shlex.join([f'.[{extras}]', *tools])} \\",
        "    && ln -s /opt/venv/bin/areal-lab /usr/local/bin/",
    ]
    if request.packages:
        lines += [
            "# The weights of these models; what the packages depend on is not needed.",
            f"RUN {_PIP} --no-deps {shlex.join(request.packages)}",
        ]
    lines += ["", "ENV AREAL_LAB_ENGINES=/opt/engines"]
    if request.engine:
        lines.append(f"RUN areal-lab engine install {request.engine} --build {build}")
    lines += [
        "",
        f"RUN useradd --no-log-init --create-home --uid {USER_ID} lab \\",
        f"    && install --directory --owner lab --group lab {WORK} {RUNS}",
        "# By number, so that Kubernetes can see that it is not root.",
        f"USER {USER_ID}",
        f"WORKDIR {WORK}",
        'ENV PATH="/opt/venv/bin:${PATH}" PYTHONUNBUFFERED=1',
        "# The image alone serves nothing; compose and Kubernetes check what they start.",
        "HEALTHCHECK NONE",
        'ENTRYPOINT ["tini", "--"]',
        'CMD ["areal-lab", "doctor"]',
        "",
    ]
    title = f"areal_lab on {'CPUs' if build == 'cpu' else 'NVIDIA GPUs'}. Build it in a checkout."
    return comments(head_of(request, title)) + "\n".join(lines)


def ignore_file() -> str:
    """Ignore all but what the Dockerfile copies: no run, key or git history gets into an image."""
    kept = ("constraints.txt", "pyproject.toml", "README.md", "LICENSE", *_SOURCES)
    lines = ["*", *(f"!{name}" for name in kept), "**/__pycache__", "**/*.pyc"]
    return comments(["What the image is built from; nothing else is sent to the builder."]) + (
        "\n".join(lines) + "\n"
    )


def build_command(request: Request, folder: str) -> str:
    """The command that builds the request's image, in a checkout."""
    path = f"{folder}/Dockerfile.{request.build}"
    return shlex.join(["docker", "build", "--file", path, "--tag", request.image, "."])
