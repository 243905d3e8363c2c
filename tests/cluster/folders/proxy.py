"""A server between client and agent that alters replies, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from areal_lab.cluster.folders.connections import Agent

Alter = Callable[[str, dict[str, str], bytes], tuple[dict[str, str], bytes]]
"""From path, headers and body of a reply to what is sent instead; a body that is shorter than the
headers say ends the connection."""


@contextmanager
def altered(agent: Agent, alter: Alter) -> Iterator[Agent]:
    """The agent behind a proxy that alters its replies."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            """Pass a request on, and alter the reply."""
            host, port = agent.address.rsplit(":", 1)
            connection = HTTPConnection(host, int(port))
            connection.request("GET", self.path, headers=dict(self.headers))
            reply = connection.getresponse()
            headers, body = alter(self.path, dict(reply.headers), reply.read())
            connection.close()
            self.send_response_only(reply.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = len(body) < int(headers["content-length"])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Agent(f"127.0.0.1:{server.server_port}", agent.incarnation)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
