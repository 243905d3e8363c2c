"""A taskset of verifiers whose samples need a container."""

import verifiers.v1 as vf

__all__ = ["BoxedTaskset"]


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "42")


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self) -> list[BoxedTask]:
        return [BoxedTask(vf.TaskData(prompt="How much is 6 * 7?"))]
