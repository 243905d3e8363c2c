"""Problems, their split into training and held-out sets, and the endless order of prompts.

ProblemSet --train--> PromptSource[n]    prompt number n of a run, the same at every call
           --held_out--> evaluation
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lab.control.events import GroupId
from areal_lab.data.images import EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt, its gold answer, and further fields for scoring."""

    prompt: str
    """Text that the model completes, few-shot lines and template included, with `<image>` in the
    place of an image."""
    answer: str
    """Gold answer, in the form that the reward function compares."""
    key: str
    """Identity of the problem: no key is both trained on and held out. `3 + 4` and `4 + 3` share
    one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for the reward function; for a JSONL problem the other fields of its line."""
    images: tuple[EncodedImage, ...] = ()
    """Images of the prompt, in the order of their marks."""
    rendered: bool = False
    """True if a chat template wrote the prompt: it has its own begin-of-text token, or none."""

    def __post_init__(self) -> None:
        for name in ("prompt", "answer", "key"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(
                    f"the {name} of a problem is {type(value).__name__} ({value!r:.60}), but must "
                    "be text; rows with fields are taken where problems are: "
                    '{"question": "2 + 3 =", "answer": "5"}'
                )
        if not self.prompt:
            raise ValueError(f"problem {self.key!r} has an empty prompt")

    def as_example(self) -> dict[str, Any]:
        """Second argument of a reward function: `prompt`, `answer` and the metadata."""
        return {**self.metadata, "prompt": self.prompt, "answer": self.answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems to train on and held-out problems for evaluation; no key is in both."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            given = getattr(self, name)
            if given is None or isinstance(given, str):
                raise ValueError(f"{name} is {given!r:.60}, but must be a list of problems")
            object.__setattr__(self, name, tuple(given))
            wrong = next((one for one in getattr(self, name) if not isinstance(one, Problem)), None)
            if wrong is not None:
                raise ValueError(
                    f"{name} has {type(wrong).__name__} ({wrong!r:.60}), but must have problems; "
                    "train(config, problems=rows) takes rows"
                )
        if not self.train:
            raise ValueError("there are no problems to train on; at least one is needed")
        if not self.held_out:
            raise ValueError("there are no held-out problems; at least one is needed")
        both = {problem.key for problem in self.train} & {p.key for p in self.held_out}
        if both:
            raise ValueError(
                f"{len(both)} problems are both trained on and held out, such as {min(both)!r}"
            )

    def digest(self) -> str:
        """SHA-256 over prompts, answers, keys and images in order: equal for the same data only."""
        hashed = hashlib.sha256()
        for problems in (self.train, self.held_out):
            hashed.update(f"{len(problems)}\n".encode())
            for one in problems:
                images = [[image.digest for image in one.images]] if one.images else []
                fields = [one.prompt, one.answer, one.key, *images]
                hashed.update(json.dumps(fields).encode() + b"\n")
        return hashed.hexdigest()


class EpochOrder:
    """Item number n of an endless sequence, for any n >= 0: shuffled epoch by epoch.

    Every epoch has each item once. The item depends only on `count`, the number of items, the seed
    of the run, n, and `stream`, the purpose of the order.
    """

    _EPOCHS_KEPT = 4  # groups in flight are a few batches apart: some epochs of a tiny set

    def __init__(self, count: int, *, seed: int, stream: str) -> None:
        self._count = count
        self._stream = f"{seed}/{stream}"
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    def __getitem__(self, n: int) -> int:
        """Index of item number `n`."""
        if n < 0:
            raise IndexError(f"prompt number is {n}, but must be >= 0")
        epoch, position = divmod(n, self._count)
        return self._order(epoch)[position]

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(self._count))
            random.Random(f"{self._stream}/{epoch}").shuffle(order)
            self._orders[epoch] = order
            if len(self._orders) > self._EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return order


class PromptSource:
    """Prompt number n of a run, for any n >= 0: shuffled epoch by epoch, with random access.

    >>> source = PromptSource(problems, seed=1)
    >>> source[10_000] == source[10_000]      # a recovered run has no position to restore
    True

    Every epoch has each problem once. The prompt depends only on the problems, the seed and n.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int) -> None:
        if not problems:
            raise ValueError("a prompt source needs at least one problem")
        self._problems = tuple(problems)
        self._order = EpochOrder(len(self._problems), seed=seed, stream="prompts")

    def __getitem__(self, n: int) -> Problem:
        """Prompt number `n`."""
        return self._problems[self._order[n]]


SMALLEST_HELD_OUT = 32
"""Fewer problems cannot distinguish rewards of 0.5 and 0.85 with confidence."""

LARGEST_HELD_OUT = 256


def held_out_size(problems: int, asked: int) -> int:
    """Number of problems to hold out.

    `asked` is the setting; 0 takes a fifth, at least 32 and at most 256, but at most half.
    """
    if asked < 0:
        raise ValueError(f"eval_size is {asked}, but must be >= 0 (0: a fifth of the problems)")
    if asked >= problems:
        raise ValueError(
            f"eval_size is {asked}, but there are {problems} problems: none is left to train on"
        )
    if asked:
        return asked
    return max(1, min(problems // 2, LARGEST_HELD_OUT, max(SMALLEST_HELD_OUT, problems // 5)))


def numbered_problems(*, size: int, prompt_template: str, eval_size: int = 0) -> ProblemSet:
    """Problems 0 to `size - 1`, each with its number as `seed`; the last ones are held out.

    In `prompt_template`, the text of all prompts, `{prompt}` is replaced by the number, from which
    a model may learn the environment's problem. `eval_size` 0 is the default of `held_out_size`.
    """
    if size < 2:
        raise ValueError(f"dataset.size is {size}, but must be >= 2: one is held out")
    if prompt_template in ("", "{prompt}"):
        raise ValueError(
            f"dataset.prompt_template is {prompt_template!r}, but type=numbered has no text, and "
            "its numbers may tell the solution; write what samples begin with, as 'Let us play. '"
        )
    problems = [
        Problem(
            prompt=prompt_template.replace("{prompt}", str(number)),
            answer="",
            key=str(number),
            metadata={"seed": number},
        )
        for number in range(size)
    ]
    train = size - held_out_size(size, eval_size)
    return ProblemSet(train=tuple(problems[:train]), held_out=tuple(problems[train:]))


def sample_seed(run_seed: int, stream: str, group: GroupId, sample: int, turn: str = "") -> int:
    """Seed of one sample: a 31-bit hash, so adjacent groups share no random numbers.

    `stream` is the purpose of the sample, such as "train", with separate seeds for each.
    """
    text = f"{run_seed}/{stream}/{group}/{sample}{turn and '/'}{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
