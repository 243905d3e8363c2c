"""Claude Code: the command line in the wheel of claude-agent-sdk, driven by that."""

from __future__ import annotations

import os
from pathlib import Path

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, ClaudeSDKClient, TextBlock
from tasks import Task, do


async def reads(task: Task) -> list[str]:
    """Reads a file with its own tool, and is asked once more."""
    Path("numbers.txt").write_text("5 and 9")
    options = ClaudeAgentOptions(
        allowed_tools=["Read"],
        cwd=Path.cwd(),
        env={
            "ANTHROPIC_BASE_URL": task.url,
            "ANTHROPIC_API_KEY": task.key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HOME": os.environ["HOME"],
        },
    )
    said: list[str] = []
    async with ClaudeSDKClient(options) as client:
        for text in (task.question, task.again):
            await client.query(text)
            async for message in client.receive_response():
                if isinstance(message, AssistantMessage):
                    said += [part.text for part in message.content if isinstance(part, TextBlock)]
    return said


do(reads=reads)
