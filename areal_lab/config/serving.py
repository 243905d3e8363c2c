"""Every setting of `areal-lab gateway` and `areal-lab engine serve`.

areal-lab gateway MODEL port=30100        the same as --port 30100
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from areal_lab.config.record import About, Count, Record, Share, Whole

Port = Annotated[int, Ge(0), Le(65535)]


class GatewayConfig(Record):
    """What a gateway listens on, how it serves sessions, and how many."""

    port: Port = 30100
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines."""
    admin_key_file: Annotated[str, About(metavar="FILE")] = ""
    """File with the admin key, or to be made; the default is a new key in a separate file."""
    export: Annotated[str, About(metavar="FOLDER")] = ""
    """Write each session into sessions.jsonl of this folder when it ends. By default only those
    that nothing has exported, below gateways/, when the gateway ends."""
    capacity: Whole | None = None
    """Sessions that may be started before POST /grant_capacity grants more; the default is any
    number."""
    open_sessions: Count = 1024
    """Sessions at once; one more is refused with 429."""
    requests: Count = 1024
    """Calls that sample at once; one more is refused with 429."""
    session_requests: Count = 64
    """Calls that sample at once in one session."""
    session_timeout_s: Annotated[float, Ge(0.001)] = 3600.0
    """A session that is not used for this long is ended."""
    reward_timeout_s: Annotated[float, Ge(0)] = 0.0
    """How long after its end a session may still get its reward."""
    pinned: bool = False
    """Ignore the temperature and top-p that clients ask for, as a run does."""
    turn_discount: Share = 1.0
    """Discount of rewards in sessions.jsonl, from turn to turn."""
    turn_discount_style: Literal["tree", "linear"] = "tree"
    """tree (along each conversation) or linear (in order of creation, so that parallel
    conversations get each other's rewards)."""
    tool_call_parser: str = "auto"
    """How calls of tools are read; auto is what the template writes."""
    template: Annotated[str, About(metavar="FILE")] = ""
    """Chat template, instead of the model's."""
    describe_tools: bool = True
    """Whether tools are described in the system message if the template ignores them."""
    seed: int | None = None
    """Seed of sampling; the default is another one each time. On the command line only --seed sets
    it: `seed` without dashes is that of a run."""


GATEWAY_ALIASES: Final = {
    "max_sessions": "open_sessions",
    "max_requests": "requests",
    "max_session_requests": "session_requests",
}
"""Names of options where they differ from those of the settings."""


class ServeConfig(Record):
    """One inference server."""

    model_path: str = "SmolLM2-135M-Instruct"
    """Hugging Face model folder, or name of a packaged model."""
    port: Port = 30000
    """Port to listen on; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines."""
    dtype: str = "auto"
    """Compute type: auto, float32 or bfloat16."""
    device: str = "auto"
    """Where the embedded engine computes: auto, cpu or cuda (the first visible GPU)."""
    threads: Count = 1
    """CPU threads of the server."""
    max_running_requests: Count = 64
    """Maximum requests decoded at once."""
    context_length: Count | None = None
    """Maximum tokens per request; the default is the model's limit."""
    tensor_parallel: Count = 1
    """Number of GPUs."""
    lora_rank: Whole = 0
    """Maximum rank of LoRA adapters; 0 switches LoRA off."""
    weight_version: Whole = 0
    """Weight version that the server reports."""
    ready_timeout_s: Annotated[float, Ge(1)] = 600.0
    """Seconds the server may take to start."""
    log: Annotated[str, About(metavar="<path>")] = ""
    """Log file; the default is in a new temporary folder."""
