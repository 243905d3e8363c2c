"""A resource server of NeMo Gym, as its users write one: products, with a tool.

python -m sums_nemo    prints its address once it serves

NeMo Gym starts such a server with a head server and Ray besides; alone it needs neither.
"""

import re
import socket
import sys

import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel, Field


class Factors(BaseModel):
    a: int
    b: int


class Row(BaseVerifyRequest):
    answer: str
    careless: bool = False
    """Its grader takes for granted that the response ends with a text."""


class Verdict(BaseVerifyResponse):
    right: bool
    called: bool


class Sums(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    called: dict[str, bool] = Field(default_factory=dict)
    """Whether the tool was called, by the session of the cookie."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/times")(self.times)
        return app

    async def seed_session(
        self,
        request: Request,
        body: BaseSeedSessionRequest,  # noqa: ARG002 - NeMo Gym's
    ) -> BaseSeedSessionResponse:
        self.called[request.session[SESSION_ID_KEY]] = False
        return BaseSeedSessionResponse()

    async def times(self, request: Request, body: Factors) -> int:
        self.called[request.session[SESSION_ID_KEY]] = True
        return body.a * body.b

    async def verify(self, request: Request, body: Row) -> Verdict:
        output = body.response.output
        called = self.called.pop(request.session[SESSION_ID_KEY])
        if body.careless:
            text = output[-1].content[0].text
        else:
            last = output[-1] if output else None
            text = last.content[0].text if getattr(last, "type", "") == "message" else ""
        right = body.answer in re.findall(r"\d+", text)
        reward = 0.75 * right + 0.25 * called
        return Verdict(
            responses_create_params=body.responses_create_params,
            response=body.response,
            reward=reward,
            right=right,
            called=called,
        )


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    host, port = listener.getsockname()
    server = Sums(
        config=BaseResourcesServerConfig(name="sums", host=host, port=port, entrypoint="app.py"),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host=host, port=port),
            global_config_dict=OmegaConf.create({}),
        ),
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    listener.listen()
    print(f"http://{host}:{port}", flush=True)
    sys.stdout = sys.stderr  # nobody reads further
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
