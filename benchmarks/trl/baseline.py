"""The same GRPO run in TRL's `GRPOTrainer`, started by `benchmarks.trl`.

    problems as JSONL -> GRPOTrainer -> progress as JSON lines (step, time, reward, CPU seconds)

Runs in TRL's own environment and imports nothing from areal_lab. Tuned for TRL, beyond its
defaults: micro-batches of 16, no gradient checkpointing, one generation per optimizer step, the
newline as an end-of-sequence token (TRL then stops and masks there), no checkpoints and
no logging of completions. Set as in areal_lab: problems in the same order, the same learning
rate at each step.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer


def read_problems(path: Path) -> list[dict[str, str]]:
    """Lines with `prompt` (the raw text the model continues) and `answer`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact_first_line(completion: str, answer: str) -> float:
    """1 if the first line of the completion is the answer."""
    return float(completion.split("\n", 1)[0].strip() == answer)


class Progress(TrainerCallback):
    """Write progress to a JSON-lines file, and end the run at its time limit."""

    def __init__(self, path: Path, *, limit_s: float) -> None:
        self.path = path
        self.limit_s = limit_s
        self.began_s = 0.0

    def write(self, name: str, **values: float | str) -> None:
        """Write a line; times are seconds since the epoch, `cpu_s` of this process so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        line = {"event": name, "at_s": time.time(), "cpu_s": usage.ru_utime + usage.ru_stime}
        with self.path.open("a") as file:
            file.write(json.dumps({**line, **values}) + "\n")

    def held_out(self, name: str, rewards: list[float]) -> None:
        """Rewards on the held-out problems, if there are any."""
        if rewards:
            self.write(name, mean=sum(rewards) / len(rewards), n=len(rewards))

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Training starts; everything is loaded."""
        self.began_s = time.time()
        self.write("began")

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - transformers passes it by position
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """After each optimizer step."""
        if logs is None or "reward" not in logs:
            return
        reward, length = float(logs["reward"]), float(logs["completions/mean_length"])
        self.write("step", step=state.global_step, reward=reward, tokens_mean=length)
        if time.time() - self.began_s > self.limit_s:
            control.should_training_stop = True


@torch.no_grad()
def held_out_rewards(
    model: Any, tokenizer: Any, problems: list[dict[str, str]], *, samples: int, tokens: int
) -> list[float]:
    """Rewards of `samples` completions of each problem at temperature 1, 64 at a time."""
    model.eval()
    repeated = [problem for problem in problems for _ in range(samples)]
    rewards: list[float] = []
    for start in range(0, len(repeated), 64):
        part = repeated[start : start + 64]
        inputs = tokenizer(
            [problem["prompt"] for problem in part],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        output = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens
        )
        texts = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        rewards += [
            exact_first_line(text, problem["answer"])
            for text, problem in zip(texts, part, strict=True)
        ]
    return rewards


def settings(arguments: argparse.Namespace) -> GRPOConfig:
    """The run's settings in TRL, equal to those of configs/arithmetic.yaml."""
    samples = arguments.prompts * arguments.group_size
    return GRPOConfig(
        output_dir=str(arguments.output.parent / "trl"),
        use_cpu=True,
        bf16=arguments.dtype == "bf16",
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=samples // arguments.micro_batch,
        num_generations=arguments.group_size,
        max_completion_length=arguments.new_tokens,
        max_steps=arguments.steps,
        learning_rate=max(arguments.learning_rates),
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        loss_type="dapo",  # the mean over all tokens of the batch, TRL's default and ours
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=arguments.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=arguments.seed,
    )


def optimizer_of(
    model: Any, arguments: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with the given learning rate at each step."""
    rates = arguments.learning_rates
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates[min(step, len(rates) - 1)]
    )
    return optimizer, scheduler


def numbers(text: str) -> list[float]:
    """Numbers between commas."""
    return [float(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    """The command line; `benchmarks.trl` fills it in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="progress, JSON lines")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--learning-rates", type=numbers, required=True, help="0.1,0.2: by step")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--held-out-samples", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train, then measure on the held-out problems."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    progress = Progress(arguments.output, limit_s=arguments.limit_s)
    progress.write("loaded_packages", torch=torch.__version__)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    if len(newline) != 1:
        raise ValueError(
            f"the newline is {len(newline)} tokens of this vocabulary, but must be one"
        )
    # TRL takes its stop tokens from here, both for generation and for the mask.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, newline[0]]

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [exact_first_line(text, key) for text, key in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(arguments),
        train_dataset=Dataset.from_list(read_problems(arguments.train)),
        processing_class=tokenizer,
        callbacks=[progress],
        optimizers=optimizer_of(model, arguments),
    )
    held_out = read_problems(arguments.held_out)
    sizes = {"samples": arguments.held_out_samples, "tokens": arguments.new_tokens}
    # Before and after training, as areal_lab does, so that both sides do the same work.
    progress.held_out("before", held_out_rewards(model, tokenizer, held_out, **sizes))
    trainer.train()
    progress.held_out("after", held_out_rewards(model, tokenizer, held_out, **sizes))
    progress.write("ended")


if __name__ == "__main__":
    main()
