"""The trainer's HTTP connection to one engine during a push; errors name engine and phase.

The checksums that SGLang reports on a CPU for given tensors.

The embedded engine reports our checksum of all weights. SGLang on a CPU reports, for each
parameter, the first eight bytes of the SHA-256 of its memory. Its parameter names are those of the
model folder, except for

    qkv_proj        q_proj, k_proj, v_proj, concatenated by rows
    gate_up_proj    gate_proj, up_proj, concatenated by rows
    embed_tokens    padded with rows of zeros to a multiple of 64, as is lm_head

On a GPU it hashes differently, and a tensor-parallel rank holds parts: nothing is compared then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any

import httpx2
import torch
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.engines.keys import authorization
from areal_lab.engines.weights.records import (
    EngineTarget,
    Phase,
    Problem,
    TransferFailed,
    transfer_failed,
)
from areal_lab.host.certificates import certificates_for
from areal_lab.host.ports import connect_s

_CONNECT_S = 5.0
_JSON = {"content-type": "application/json"}


class Expected:
    """The version and checksums that an engine must report after a push."""

    def __init__(self, version: Version, checksum: str, tensors: Mapping[str, Tensor]) -> None:
        self.version = version
        self.checksum = checksum
        """Our checksum, which the embedded engine reports."""
        self.tensors = tensors

    @cached_property
    def sglang_checksums(self) -> dict[str, str]:
        """The checksums that SGLang reports on a CPU, by its parameter names."""
        return sglang_checksums(self.tensors)


class EngineLink:
    """Requests to one engine about one version."""

    def __init__(self, target: EngineTarget, version: Version, *, timeout_s: float) -> None:
        """Create a link; nothing is sent yet."""
        self.base_url = target.base_url
        self.ranks = target.ranks
        """Tensor-parallel degree; replaced by the engine's own report when the update opens."""
        self.timeout_s = timeout_s
        self.version_before = ""
        """The version that the engine reported when the update was opened."""
        self._version = version
        self._has_sessions = True
        self._computes_on_a_cpu = False
        """True if it reports the checksums of `weights.folder`; on a GPU it hashes differently."""
        self._http = httpx2.Client(
            base_url=target.base_url,
            headers=authorization(target.key),
            timeout=httpx2.Timeout(
                timeout_s, connect=min(connect_s(target.base_url, _CONNECT_S), timeout_s)
            ),
            trust_env=False,  # engines are addressed directly, never through a proxy
            verify=certificates_for(target.base_url),
        )

    def __enter__(self) -> EngineLink:
        """Close the connections at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        self._http.close()

    def open_update(self) -> None:
        """Open an update; one that a failed transfer left open is closed first."""
        self.version_before = self._reported_version(Phase.OPEN)
        # An attached server may have any number of ranks, and crashes if one gets no tensors.
        reported = self._object(Phase.OPEN, "GET", "/server_info", None)
        self.ranks = int(reported.get("tp_size") or self.ranks)
        self._computes_on_a_cpu = reported.get("device") == "cpu"
        reply = self._request(Phase.OPEN, "POST", "/begin_weight_update", b"{}")
        if reply.status_code == httpx2.codes.NOT_FOUND:
            self._has_sessions = False  # SGLang before 0.5.21
        elif reply.is_error:
            self.post(Phase.OPEN, "/end_weight_update", {})
            self.post(Phase.OPEN, "/begin_weight_update", {})

    def close_update(self) -> None:
        """Close the update."""
        if self._has_sessions:
            self.post(Phase.CLOSE, "/end_weight_update", {})

    def post(self, phase: Phase, path: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """Send a request that succeeds or raises."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._object(phase, "POST", path, content)

    def verify(self, expected: Expected) -> None:
        """Compare version and checksum that the engine reports with what was sent."""
        reported = self._reported_version(Phase.VERIFY)
        if reported != str(expected.version):
            raise self.failure(Phase.VERIFY, "mismatch", f"it holds version {reported}")
        reply = self.post(Phase.VERIFY, "/weights_checker", {"action": "checksum"})
        wrong = None
        if "checksum" in reply:
            if reply["checksum"] != expected.checksum:
                wrong = f"sent checksum {expected.checksum}, it holds {reply['checksum']}"
        elif self._computes_on_a_cpu:
            wrong = difference(expected.sglang_checksums, reply)
        if wrong is not None:
            raise self.failure(Phase.VERIFY, "mismatch", wrong)

    def failure(self, phase: Phase, problem: Problem, what: str) -> TransferFailed:
        """Error about this engine."""
        return transfer_failed(self.base_url, phase, problem, what, version=self._version)

    # --- internal ---

    def _reported_version(self, phase: Phase) -> str:
        return str(self._object(phase, "GET", "/model_info", None).get("weight_version"))

    def _object(
        self, phase: Phase, method: str, path: str, content: bytes | None
    ) -> dict[str, Any]:
        reply = self._request(phase, method, path, content)
        try:
            body = reply.json()
        except ValueError:
            body = {}
        fields = body if isinstance(body, dict) else {}
        if reply.is_error or fields.get("success") is False:
            raise self.failure(phase, "refused", f"{path}: {_reason(reply, fields)}")
        return fields

    def _request(
        self, phase: Phase, method: str, path: str, content: bytes | None
    ) -> httpx2.Response:
        try:
            return self._http.request(method, path, content=content, headers=_JSON)
        except httpx2.TimeoutException as error:
            what = f"no reply to {path} within {self.timeout_s:g} s"
            raise self.failure(phase, "unreachable", what) from error
        except httpx2.TransportError as error:
            what = f"{path}: {str(error) or type(error).__name__}"
            raise self.failure(phase, "unreachable", what) from error


def _reason(reply: httpx2.Response, fields: Mapping[str, Any]) -> str:
    message = fields.get("message") or fields.get("error")
    if isinstance(message, dict):
        message = message.get("message")
    text = " ".join(str(message or reply.text).split())
    return f"{reply.status_code}: {text[:300]}"


VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_PARTS = {"k_proj", "v_proj", "up_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}


def sglang_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksum of each parameter by SGLang's names, for an engine with one CPU rank."""
    return {name: _sha256(tensor) for name, tensor in _in_sglang_layout(tensors)}


def difference(expected: Mapping[str, str], reply: Mapping[str, Any]) -> str | None:
    """How a `/weights_checker` reply of SGLang contradicts `expected`; `None` if it does not.

    Parameters with a layout unknown here (the experts of a mixture) are not compared, but a reply
    without a single known name is a contradiction.
    """
    ranks = reply.get("ranks") or []
    if len(ranks) != 1:
        return None  # each rank holds parts
    found = ranks[0]["checksums"]
    common = sorted(expected.keys() & found.keys())
    if not common:
        return "none of its parameters has a name that was sent"
    wrong = [name for name in common if expected[name] != found[name]]
    if not wrong:
        return None
    name = wrong[0]
    return (
        f"{len(wrong)} of {len(common)} parameters differ, such as {name} "
        f"(sent {expected[name]}, holds {found[name]})"
    )


def _in_sglang_layout(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        *path, module, kind = name.split(".") if "." in name else ("", name, "")
        if module in _FUSED:
            fused, parts = _FUSED[module]
            names = [".".join((*path, part, kind)) for part in parts]
            if all(part in tensors for part in names):
                yield ".".join((*path, fused, kind)), torch.cat([tensors[part] for part in names])
                continue
        if module in _PARTS:
            continue
        if module in _VOCABULARY:
            yield name, _padded(tensor)
        else:
            yield name, tensor


def _padded(tensor: Tensor) -> Tensor:
    missing = -len(tensor) % VOCABULARY_MULTIPLE
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
