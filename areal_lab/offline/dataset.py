"""The items of a run: its rows as tokens, checked, with the rule by which they were made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.offline import OfflineConfig, RewardModelConfig, SFTConfig
from areal_lab.config.problem import refusal
from areal_lab.data.wrapping import Wrapping
from areal_lab.offline.examples import Encoder, Item, Learn
from areal_lab.offline.rows import RowSet


@dataclass(frozen=True, slots=True)
class Data:
    """The items of a run."""

    train: list[Item]
    held_out: list[Item]
    wrapping: Wrapping
    digest: str
    dropped: dict[str, int]
    """Rows that were left out, by reason."""


def make_data(config: OfflineConfig, model_path: Path, rows: RowSet) -> Data:
    """The items of the rows, checked.

    Args:
        config: of the run.
        model_path: folder with the tokenizer.
        rows: trained and held-out ones.

    Raises:
        ConfigError: in one line.
    """
    dataset = config.rows
    learn: Learn = "responses"
    if isinstance(config, SFTConfig):
        learn = config.train_on
    elif isinstance(config, RewardModelConfig):
        learn = "score"
    encoder = Encoder(model_path, dataset, learn, chat=rows.has_messages)
    train, held_out = encoder.items(rows.train), encoder.items(rows.held_out)
    dropped = dict(train.dropped + held_out.dropped)
    if rows.in_both:
        dropped["the prompt is also held out"] = rows.in_both
    for items, what in ((train, "train on"), (held_out, "hold out")):
        needed = dataset.batch_size if what == "train on" else 1
        if len(items.items) < needed:
            why = f" (left out: {dict(items.dropped)})" if items.dropped else ""
            raise refusal(
                "dataset",
                f"dataset has {len(items.items)} rows to {what}{why}, but needs at least {needed}",
            )
    return Data(train.items, held_out.items, encoder.wrapping, rows.digest(), dropped)
