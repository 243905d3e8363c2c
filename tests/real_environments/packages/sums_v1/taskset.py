import verifiers.v1 as vf

from sums_v1.servers.tool import SumsToolset


class SumsData(vf.TaskData):
    answer: str = ""


class SumsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def long_enough(self, trace: vf.Trace) -> float:
        """Differs between the samples of a model that says anything."""
        return float(trace.num_output_tokens % 2)

    @vf.reward(weight=1.0)
    async def fails(self, trace: vf.Trace) -> float:
        del trace
        if self.data.answer == "fails":
            raise RuntimeError("the judge does not answer")
        return 0.0


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 12
    failing: int = 0
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(
                    prompt=f"How much is {n} * {n + 1}?",
                    answer="fails" if n < self.config.failing else str(n * (n + 1)),
                ),
                self.config.task,
            )
            for n in range(self.config.num_tasks)
        ]
