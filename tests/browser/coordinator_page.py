# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab"]
# ///
"""A page that needs nothing but the standard library: how many groups eq. 3 starts at once."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Coordinator")

with app.setup:
    import sys
    from pathlib import Path

    import marimo as mo

    # As in notebook 4, to see that the page knows a file of its own.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

    from areal_lab.control.coordinator import Coordinator, Limits
    from areal_lab.control.events import RunStarted
    from areal_lab.control.order import oldest_finished_first
    from areal_lab.control.schedule import asynchronous


@app.cell
def _():
    eta = mo.ui.slider(0, 8, value=2, label="eta")
    eta
    return (eta,)


@app.cell
def _(eta):
    limits = Limits(
        batch_groups=16,
        max_in_flight=1000,
        train_steps=None,
        save_every_steps=0,
        schedule=asynchronous(eta.value),
        order=oldest_finished_first(),
    )
    started = len(Coordinator(limits).handle(RunStarted((0,))))
    mo.md(f"With eta {eta.value}, {started} groups start at once.")
    return (started,)


if __name__ == "__main__":
    app.run()
