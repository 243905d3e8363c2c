"""A training loop on controllers, as a program of a user: `python -m tests.shell.controllers_loop`.

Arguments: a config file, and the folder for logs. Ctrl-C ends it as it ends commands.
"""

from __future__ import annotations

import signal
import sys

from areal_lab.config.load import load_config
from areal_lab.controllers.fronts import (
    EmbeddedEngine,
    FSDPPPOActor,
    LocalScheduler,
    RolloutController,
    TrainController,
)
from areal_lab.host.terminal import INTERRUPTED


def main(config_file: str) -> None:
    """Train until the end of the config."""
    config = load_config(config_file)
    scheduler = LocalScheduler(n_nodes=2, shared_files="never", say=tell)
    rollout = RolloutController(EmbeddedEngine(config), scheduler)
    actor = TrainController(engine=FSDPPPOActor(config=config), scheduler=scheduler)
    with actor, rollout:
        tell(f"run folder {scheduler.folder}")
        for step in range(1, config.total_train_steps + 1):
            actor.ppo_update(rollout.prepare_batch())
            rollout.update_weights(actor)
            tell(f"step {step:>3}/{config.total_train_steps}")


def tell(text: str) -> None:
    """Show what happens."""
    print(text, file=sys.stderr)


if __name__ == "__main__":
    # Shells ignore it for what they start in the background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
