import json
import random

import verifiers.v1 as vf
from verifiers.v1.types import AssistantMessage, Messages, ToolCall, ToolMessage, UserMessage

from products_v1.servers.tool import ProductsToolsConfig, ProductsToolset

EXAMPLES = ((34, 27, True), (12, 15, False), (61, 18, True))
"""Factors, and whether the tool is called: a small model then calls it in some samples."""


def asked(a: int, b: int) -> UserMessage:
    return UserMessage(content=f"Question: {a} * {b}")


def prompt(a: int, b: int) -> Messages:
    messages: Messages = []
    for number, (left, right, called) in enumerate(EXAMPLES):
        messages.append(asked(left, right))
        if called:
            call = ToolCall(
                id=f"call{number}",
                name="multiply",
                arguments=json.dumps({"a": left, "b": right}),
            )
            messages += [
                AssistantMessage(tool_calls=[call]),
                ToolMessage(tool_call_id=call.id, content=str(left * right)),
            ]
        messages.append(AssistantMessage(content=f"Answer: {left * right}"))
    return [*messages, asked(a, b)]


class ProductsData(vf.TaskData):
    answer: str = ""


class ProductsTask(vf.Task[ProductsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == f"Answer: {self.data.answer}")


class ProductsConfig(vf.TasksetConfig):
    num_tasks: int = 400
    tools: ProductsToolsConfig = ProductsToolsConfig()


class ProductsTaskset(vf.Taskset[ProductsTask, ProductsConfig]):
    @classmethod
    def toolsets(cls, config: ProductsConfig) -> list[vf.Toolset]:
        """One server for all samples: it keeps nothing between calls."""
        return [ProductsToolset(config.tools)]

    def load(self) -> list[ProductsTask]:
        pairs = [(a, b) for a in range(11, 100) for b in range(a, 100)]
        random.Random(1).shuffle(pairs)
        return [
            ProductsTask(ProductsData(prompt=prompt(a, b), answer=str(a * b)))
            for a, b in pairs[: self.config.num_tasks]
        ]
