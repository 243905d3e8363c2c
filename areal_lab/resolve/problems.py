"""The problems of a config or of a program, with prompts as the model's chat template writes them.

config.dataset, or what a program gives --rows--> Problem
                                          '- messages --chat template of actor.path--> text
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_lab.agents.template import ChatTemplate, load_template
from areal_lab.config.schema import TrainConfig
from areal_lab.data.jsonl import Message, Render
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.runners.tasks import environment_problems
from areal_lab.data.sources import given_list, given_problems, load_problems
from areal_lab.models.locate import resolve_model_path


def run_problems(config: TrainConfig, given: object = None) -> ProblemSet:
    """The problems of a run.

    Args:
        config: names the data set, or the fields of what is given, and the model.
        given: instead of the data set: see `data.sources.given_problems`.

    Raises:
        ValueError: in one line.
    """
    render = renderer(config.actor.path)
    if given is None and config.dataset.type == "environment":
        size = config.dataset.eval_size
        return environment_problems(config.environment, eval_size=size, seed=config.seed)
    if given is None:
        return load_problems(config.dataset, seed=config.seed, render=render)
    return given_problems(given, config.dataset, seed=config.seed, render=render)


def train_problems(config: TrainConfig, given: object = None) -> tuple[Problem, ...]:
    """The problems to train on; all of what is given, of a `ProblemSet` its part.

    Raises:
        ValueError: in one line.
    """
    if given is None or isinstance(given, ProblemSet):
        return run_problems(config, given).train
    return tuple(given_list(given, "problems", config.dataset, renderer(config.actor.path)))


def renderer(model: str) -> Render:
    """Return a function that writes messages as the chat template of a model does.

    The model is looked for at the first call, which raises a ValueError if there is none.
    """
    templates: list[ChatTemplate] = []

    def render(messages: Sequence[Message]) -> str:
        if not templates:
            templates.append(load_template(resolve_model_path(model)))
        return templates[0].data(messages)

    return render
