import re

import verifiers.v1 as vf

from sums_v1.servers.tool import SumsToolsConfig, SumsToolset


class SumsData(vf.TaskData):
    answer: str = ""


class SumsTaskConfig(vf.TaskConfig):
    tools: SumsToolsConfig = SumsToolsConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)]

    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "fails":
            raise RuntimeError("the judge does not answer")
        return float(self.data.answer in re.findall(r"\d+", trace.last_reply))

    @vf.reward(weight=0.25)
    async def called(self, trace: vf.Trace) -> float:
        return float(any(message.tool_calls for message in trace.assistant_messages))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 12
    failing: int = 0
    image: str | None = None
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(
                    prompt=f"How much is {n} * {n + 1}?",
                    answer="fails" if n < self.config.failing else str(n * (n + 1)),
                    image=self.config.image,
                ),
                self.config.task,
            )
            for n in range(self.config.num_tasks)
        ]
