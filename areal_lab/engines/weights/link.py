"""One engine as the trainer speaks to it: control requests, and which phase they belong to."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from functools import cache, cached_property
from types import TracebackType
from typing import Any

import httpx
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.engines.weights.checksums import difference, sglang_checksums
from areal_lab.engines.weights.records import (
    EngineTarget,
    Phase,
    Problem,
    TransferFailed,
    transfer_failed,
)

_CONNECT_S = 5.0
_JSON = {"content-type": "application/json"}


class Expected:
    """What an engine must report when it holds a version."""

    def __init__(self, version: Version, checksum: str, tensors: Mapping[str, Tensor]) -> None:
        self.version = version
        self.checksum = checksum
        """Ours, which the embedded engine answers."""
        self.tensors = tensors

    @cached_property
    def sglang_checksums(self) -> dict[str, str]:
        """What SGLang answers on a CPU, by its names of the parameters."""
        return sglang_checksums(self.tensors)


class EngineLink:
    """Requests to one engine about one version; every failure names the engine and the phase."""

    def __init__(self, target: EngineTarget, version: Version, *, timeout_s: float) -> None:
        """Nothing is sent yet.

        Args:
            version: the one to be sent.
            timeout_s: longest wait for the answer to one request.
        """
        self.base_url = target.base_url
        self.ranks = target.ranks
        """As the engine says, if it does, once the update is open."""
        self.timeout_s = timeout_s
        self.version_before = ""
        """What the engine said it held when the update was opened."""
        self._version = version
        self._has_sessions = True
        self._computes_on_a_cpu = False
        """Whether its checksums are those of `checks`; a GPU has a hash of its own."""
        self._http = httpx.Client(
            base_url=target.base_url,
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s)),
            trust_env=False,  # engines are addressed directly, never through a proxy
            verify=_certificates(),
        )

    def __enter__(self) -> EngineLink:
        """Use it as a context: connections are closed at the end."""
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
        """Begin an update; one that a failed transfer left open is ended first."""
        self.version_before = self._reported_version(Phase.OPEN)
        # A server that somebody else runs may be divided in any way, and dies of a part too few.
        reported = self._object(Phase.OPEN, "GET", "/server_info", None)
        self.ranks = int(reported.get("tp_size") or self.ranks)
        self._computes_on_a_cpu = reported.get("device") == "cpu"
        reply = self._request(Phase.OPEN, "POST", "/begin_weight_update", b"{}")
        if reply.status_code == httpx.codes.NOT_FOUND:
            self._has_sessions = False  # SGLang before 0.5.21
        elif reply.is_error:
            self.post(Phase.OPEN, "/end_weight_update", {})
            self.post(Phase.OPEN, "/begin_weight_update", {})

    def close_update(self) -> None:
        """End the update."""
        if self._has_sessions:
            self.post(Phase.CLOSE, "/end_weight_update", {})

    def post(self, phase: Phase, path: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """Send a request that succeeds or raises.

        Raises:
            TransferFailed: if the engine is gone, silent for too long, or refuses.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._object(phase, "POST", path, content)

    def verify(self, expected: Expected) -> None:
        """Compare version and checksum that the engine reports with what was sent.

        Raises:
            TransferFailed: `mismatch` if it holds something else.
        """
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
        """An error about this engine."""
        return transfer_failed(self.base_url, phase, problem, what, version=self._version)

    # --- below the surface ---

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
    ) -> httpx.Response:
        try:
            return self._http.request(method, path, content=content, headers=_JSON)
        except httpx.TimeoutException as error:
            what = f"no answer to {path} within {self.timeout_s:g} s"
            raise self.failure(phase, "unreachable", what) from error
        except httpx.TransportError as error:
            what = f"{path}: {str(error) or type(error).__name__}"
            raise self.failure(phase, "unreachable", what) from error


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: a client reads all of them again, 0.7 MiB, if it is not given any."""
    return httpx.create_ssl_context(trust_env=False)


def _reason(reply: httpx.Response, fields: Mapping[str, Any]) -> str:
    message = fields.get("message") or fields.get("error")
    if isinstance(message, dict):
        message = message.get("message")
    text = " ".join(str(message or reply.text).split())
    return f"{reply.status_code}: {text[:300]}"
