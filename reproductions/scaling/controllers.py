"""What passes through a single controller, and what it costs to do without. Not in the paper.

    way         reads replies            tensors to the trainer       groups move between ranks
    single      the controller           through the controller       yes
    metadata    agents on the hosts      fetched from the hosts       yes
    spmd        every rank its own       are already there            no: they wait for the slowest

The system is that of Table 1 (1.5B, three quarters of the GPUs generate, eta 4, one batch of
prompts at a time), on 1 to 128 nodes, with the paper's batch, with one that grows with the nodes,
and with batches of 1e6 to 1e9 tokens. Inputs are the measured figures packaged in
`simulator.costs.controller`, which the setting `controller.inputs` replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from areal_lab.plots.style import BLUE, GREY, VERMILION, finished, new_figure
from benchmarks.harness import Arguments
from reproductions.calibration import CALIBRATED
from reproductions.report.harness import length, main, run
from reproductions.report.records import Reproduction, Row
from simulator.costs.controller import ControllerCost, ControllerInputs, Handled
from simulator.report.notes import bottleneck
from simulator.run.result import Replicated
from simulator.stats.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

PRESET: Final = "table_1_1.5b_asynchronous"
IN_TURN: Final = ("cluster.placement=colocated", "schedule.name=synchronous")
ASYNCHRONOUS, TURNS = "asynchronous", "in turn"
WAYS: Final = ("single", "metadata", "spmd")
NODES, QUICK_NODES = (1, 16, 64, 128), (2, 16)
PAPER_NODES: Final = 16
PROMPTS: Final = 512
NODE_PROMPTS: Final = PROMPTS // PAPER_NODES
GROWS: Final = "32 prompts per node"
STAYS: Final = "512 prompts"
CURVES: Final = ((GROWS, ASYNCHRONOUS), (STAYS, ASYNCHRONOUS), (STAYS, TURNS))
"""Batch, which has as many prompts for each node as the paper's or is the paper's, and schedule."""
PAPER: Final = (STAYS, ASYNCHRONOUS)
SAMPLES: Final = 16
MEAN_TOKENS: Final = 9277
SIZES, QUICK_SIZES = (1e6, 1e7, 1e8, 1e9), (1e7,)
"""Tokens of a step."""
SIZE_NODES, QUICK_SIZE_NODES = (1, 16, 128), (1, 16)
_LARGE, _LARGEST = 2.5e8, 9e8
"""Tokens from which one seed and few steps must do, and from which only the largest cluster is
simulated: such a batch has 100,000 responses."""
_ROUNDING: Final = 0.25
"""Largest difference to a size, once every rank has as many prompts; else the cell is empty."""
ORJSON: Final = ControllerInputs(read_token_s=0.30e-6, source="as measured, with orjson")
WHY = (
    "Reading replies is nearly the whole cost of a single controller: 0.38 us of CPU a token, 25 "
    "times the time to send the same as arrays. Bytes do not limit any design: 3.3 GB of JSON and "
    "0.6 GB of arrays at the paper's batch, a third of a second on a network of 100 Gb/s.",
    "A step that is not bound by its longest response grows with the tokens of a batch, like the "
    "controller's time, so their ratio depends on the number of nodes: a single controller limits "
    "large clusters with equally large batches, not large batches. With the paper's batch, 128 "
    "nodes need the same time for a step as 16, and the controller has the same time. Engines "
    "that stream partial responses repeatedly lower the limit, and so does other work of the "
    "controller.",
    "Under an asynchronous schedule a controller that is not saturated costs nothing: it reads "
    "replies while engines generate others. When taking turns, it reads the last replies of a "
    "batch while all GPUs wait.",
    "SPMD moves no data but waits. A rank has few prompts, and the responses to a prompt have "
    "similar lengths (correlation 0.743), so ranks have different numbers of tokens. The slowest "
    "rank determines the time of generation, and also of training, because sequences stay on "
    "their rank. With eta, ranks run ahead of a slow one, which hides a part of the wait for "
    "generation; nothing hides the wait for training. When taking turns, all prompts of a batch "
    "start together, before their lengths are known. A controller then generates no faster, and "
    "only training differs. Trainers that exchange sequences between ranks before training avoid "
    "this wait, but move tensors, too.",
    "We assume that each rank splits its sequences evenly into minibatches, and that neither its "
    "program nor the barrier takes further time: both assumptions favor SPMD. Its engines are "
    "HTTP servers; engines inside the rank's process would save the reading, which is hidden "
    "anyway.",
    "No run with any of these designs was measured on a cluster. The inputs come from one process "
    "on 2 cores; a message to the controller is between 0.16 ms (many at a time) and 0.6 ms "
    "(one), so the metadata's limit may be nearer by a factor of 4.",
)

Cell: TypeAlias = tuple[float, int]
"""Tokens of a step as asked, and nodes."""
Curve: TypeAlias = tuple[str, str]
"""Batch and schedule."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The same system with each way, and with one that takes no time."""

    prompts: int
    none: Replicated
    by_way: Mapping[str, Replicated]

    def relative(self, way: str) -> Estimate:
        """Throughput over that of the way that takes no time."""
        return self.by_way[way].ratio(self.none, lambda result: result.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Simulated:
    """All simulated systems."""

    by_nodes: Mapping[Curve, Mapping[int, Ways]]
    by_size: Mapping[Cell, Ways]
    """Asynchronous."""

    @property
    def paper(self) -> tuple[int, Ways]:
        """The paper's nodes, and its run."""
        return PAPER_NODES, self.by_nodes[PAPER][PAPER_NODES]


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate all systems; `--quick` few of them."""
    made = _simulate(arguments)
    return Reproduction(
        name="controllers",
        claim=(
            "With tensors through one process, reading replies limits a run from about a hundred "
            "nodes on; with only metadata through it, from thousands. Without it (SPMD), ranks "
            "wait for the slowest one. Not in the paper."
        ),
        rows=list(_rows(made)),
        parameters=CALIBRATED,
        why=WHY,
        findings=findings(made),
        tables={
            "At the controller, per step (responses of 9,277 tokens on average)": at_controller(
                (*SIZES[:2], PROMPTS * SAMPLES * MEAN_TOKENS, *SIZES[2:])
            ),
            (
                "Seconds per step by tokens and nodes, asynchronous; sizes with fewer prompts than "
                "nodes are left out"
            ): step_table(made),
        },
        figure=lambda: draw(made),
        title="Bytes are no problem for a single controller, reading them is; SPMD pays in waiting",
        data={"controller_inputs": ControllerInputs().model_dump()},
    )


# --- simulations ---------------------------------------------------------------------------------


def _simulate(arguments: Arguments) -> Simulated:
    quick = arguments.quick
    by_nodes = {
        (batch, schedule): {
            nodes: _ways(
                nodes,
                NODE_PROMPTS * nodes if batch == GROWS else PROMPTS,
                schedule,
                arguments,
                WAYS,
            )
            for nodes in (QUICK_NODES if quick else NODES)
        }
        for batch, schedule in CURVES
    }
    one_seed = replace(arguments, repeats=1)
    by_size = {
        (tokens, nodes): _ways(nodes, found, ASYNCHRONOUS, one_seed, ("single", "spmd"))
        for tokens in (QUICK_SIZES if quick else SIZES)
        for nodes in (QUICK_SIZE_NODES if quick else SIZE_NODES)
        if (found := prompts_of(tokens, nodes)) and (tokens < _LARGEST or nodes == max(NODES))
    }
    return Simulated(by_nodes, by_size)


def prompts_of(tokens: float, nodes: int) -> int:
    """Prompts of a step of about `tokens`, as many for each of the trainer's ranks, of which
    a node has one; 0 if that is too far from it."""
    exact = tokens / (SAMPLES * MEAN_TOKENS)
    prompts = max(1, round(exact / nodes)) * nodes
    return prompts if abs(prompts / exact - 1) <= _ROUNDING else 0


def _ways(
    nodes: int, prompts: int, schedule: str, arguments: Arguments, ways: Sequence[str]
) -> Ways:
    print(f"  {prompts} prompts, {schedule}, {nodes} nodes", file=sys.stderr, flush=True)
    large = prompts * SAMPLES * MEAN_TOKENS > _LARGE
    steps = (4, 1) if schedule == TURNS else (6, 3) if large else (16, 6)
    sizes = [
        *length(arguments, steps=steps[0], warmup=steps[1], quick=(4, 2)),
        f"workload.prompts_per_batch={prompts}",
        f"schedule.max_concurrent_prompts={prompts}",
        f"gpus={8 * nodes}",
        f"rollout_gpus={6 * nodes}",
        *(IN_TURN if schedule == TURNS else ()),
    ]
    seeds = ("seeds=1",) if large else ()

    def simulated(kind: str) -> Replicated:
        chosen = (*sizes, f"controller.kind={kind}", *seeds)
        return run(PRESET, CALIBRATED, *chosen, arguments=arguments)

    return Ways(prompts, simulated("none"), {way: simulated(way) for way in ways})


# --- rows and tables -----------------------------------------------------------------------------


def _rows(made: Simulated) -> Iterator[Row]:
    for (batch, schedule), by_nodes in made.by_nodes.items():
        for nodes, ways in by_nodes.items():
            for way in WAYS:
                yield Row(
                    name=f"{batch}, {schedule}, {nodes} nodes: {way}",
                    paper=None,
                    ours=ways.relative(way),
                    unit="of the throughput without its cost",
                )


def handled(
    kind: str, tokens: float, inputs: ControllerInputs | None = None, receivers: int = PAPER_NODES
) -> Handled:
    """What a step takes of the controller: its replies and its batch."""
    cost = ControllerCost(
        kind="single" if kind == "single" else "metadata",
        inputs=inputs or ControllerInputs(),
        receivers=receivers,
    )
    responses = round(tokens / MEAN_TOKENS)
    replies, batch = (one(responses, round(tokens)) for one in (cost.reply, cost.batch))
    return Handled(*(sum(both) for both in zip(replies, batch, strict=True)))


def at_controller(sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Bytes and seconds by tokens of a step."""
    rows = []
    for tokens in sizes:
        single, metadata = handled("single", tokens), handled("metadata", tokens)
        rows.append(
            {
                "tokens": f"{tokens:.3g}".replace("e+0", "e"),
                "responses": f"{tokens / MEAN_TOKENS:,.0f}",
                "single: received, GB": f"{single.received_bytes / 1e9:.3g}",
                "sent, GB": f"{single.sent_bytes / 1e9:.3g}",
                "s": f"{single.seconds:.3g}",
                "s with orjson": f"{handled('single', tokens, ORJSON).seconds:.3g}",
                "metadata: received, MB": f"{metadata.received_bytes / 1e6:.3g}",
                "s of it": f"{metadata.seconds:.3g}",
            }
        )
    return rows


def step_table(made: Simulated) -> list[dict[str, Any]]:
    """Step time, and the bottleneck, by tokens and nodes."""
    rows = []
    for (tokens, nodes), ways in sorted(cells_of(made).items()):
        row: dict[str, Any] = {
            "tokens": f"{tokens:.2g}".replace("e+0", "e"),
            "nodes": nodes,
            "no cost": _seconds(ways.none),
        }
        single, spmd = ways.by_way["single"], ways.by_way["spmd"]
        row["single"] = _seconds(single)
        row["controller busy"] = f"{single.utilization('controller').mean:.1%}"
        row["spmd"] = _seconds(spmd)
        row["bottleneck with single"], row["with spmd"] = limit(single), limit(spmd)
        rows.append(row)
    return rows


def cells_of(made: Simulated) -> dict[Cell, Ways]:
    """Asynchronous systems by tokens of a step and nodes."""
    cells: dict[Cell, Ways] = {
        (ways.prompts * SAMPLES * MEAN_TOKENS, nodes): ways
        for (_, schedule), by_nodes in made.by_nodes.items()
        if schedule == PAPER[1]
        for nodes, ways in by_nodes.items()
    }
    return {**cells, **made.by_size}


def _seconds(of: Replicated) -> str:
    return f"{of.step_s.mean:.4g}" if of.step_s.mean < 1e4 else f"{of.step_s.mean:,.0f}"


def limit(of: Replicated) -> str:
    """The bottleneck of the first seed."""
    pools = of.results[0].pools
    return bottleneck({name: {**one.busy, **one.idle} for name, one in pools.items()})


def limit_nodes(made: Simulated, kind: str, inputs: ControllerInputs | None = None) -> float:
    """Nodes like those of the paper whose tokens a controller can just handle."""
    nodes, ways = made.paper
    per_node = ways.none.tokens_per_s.mean / nodes
    tokens = PROMPTS * SAMPLES * MEAN_TOKENS
    return tokens / handled(kind, tokens, inputs).seconds / per_node


def findings(made: Simulated) -> list[str]:
    """Summaries of the limits, and of SPMD on the paper's nodes."""
    tokens = PROMPTS * SAMPLES * MEAN_TOKENS
    single, metadata = handled("single", tokens), handled("metadata", tokens)
    found = [
        f"At the paper's batch ({tokens / 1e6:.0f} million tokens) a single controller receives "
        f"{single.received_bytes / 1e9:.1f} GB, sends {single.sent_bytes / 1e9:.1f} GB and is busy "
        f"for {single.seconds:.0f} s ({handled('single', tokens, ORJSON).seconds:.0f} s with "
        f"orjson); with metadata alone {metadata.received_bytes / 1e6:.1f} MB, "
        f"{metadata.sent_bytes / 1e6:.1f} MB and {metadata.seconds:.1f} s.",
        "It is saturated by the tokens of "
        f"{limit_nodes(made, 'single'):.0f} nodes of 8 GPUs like the paper's "
        f"({limit_nodes(made, 'single', ORJSON):.0f} with orjson), and of "
        f"{limit_nodes(made, 'metadata'):,.0f} with metadata alone, if batches grow with them.",
    ]
    for (batch, schedule), by_nodes in made.by_nodes.items():
        shown = [
            f"{', '.join(f'{way} {by_nodes[nodes].relative(way).mean:.3f}' for way in WAYS)} on "
            f"{nodes} nodes"
            for nodes in (PAPER_NODES, max(by_nodes))
            if nodes in by_nodes
        ]
        found.append(
            f"{batch}, {schedule}, times the throughput without any cost: "
            f"{'; '.join(dict.fromkeys(shown))}."
        )
    return found


# --- picture -------------------------------------------------------------------------------------

_LOOKS: Final = {"single": (VERMILION, "o"), "metadata": (BLUE, "s"), "spmd": ("#009E73", "^")}


@finished
def draw(made: Simulated) -> Picture:
    """Seconds and bytes at the controller by tokens, and throughput by nodes."""
    figure = new_figure(11.0, 8.6)
    panels = figure.subplots(2, 2)
    _draw_seconds(panels[0][0], made)
    _draw_bytes(panels[0][1])
    for axes, batch in zip(panels[1], (GROWS, STAYS), strict=True):
        _draw_throughput(axes, batch, made)
    handles, labels = panels[1][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _draw_seconds(axes: Axes, made: Simulated) -> None:
    tokens = [10 ** (6 + each / 4) for each in range(13)]
    lines = (
        ("single, json.loads", VERMILION, "-", None, "single"),
        ("single, orjson", VERMILION, "--", ORJSON, "single"),
        ("metadata", BLUE, "-", None, "metadata"),
    )
    for name, color, style, inputs, kind in lines:
        seconds = [handled(kind, one, inputs).seconds for one in tokens]
        axes.plot(tokens, seconds, style, color=color, label=name)
    cells = {key: ways.none.step_s.mean for key, ways in cells_of(made).items()}
    marks = ("o", "s", "^")
    for mark, nodes in zip(marks, sorted({nodes for _, nodes in made.by_size}), strict=False):
        points = sorted((size, step_s) for (size, n), step_s in cells.items() if n == nodes)
        axes.plot(
            *zip(*points, strict=True),
            f"{mark}:",
            color=GREY,
            markersize=4,
            label=f"step, {nodes} node{'s' * (nodes > 1)}",
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="seconds per step")
    axes.set_title("Seconds at the controller, and of the step without it")
    axes.legend(loc="upper left", fontsize=8, ncols=2)
    axes.set_ylim(top=axes.get_ylim()[1] * 30)


def _draw_bytes(axes: Axes) -> None:
    tokens = [10.0**each for each in range(6, 10)]
    single = [handled("single", one) for one in tokens]
    metadata = [handled("metadata", one) for one in tokens]
    packed = [one.sent_bytes for one in single]
    told = [one.received_bytes + one.sent_bytes for one in metadata]
    for name, color, style, values in (
        ("single: received", VERMILION, "-", [one.received_bytes for one in single]),
        ("single: sent; metadata: fetched, past the controller", VERMILION, "--", packed),
        ("metadata: received and sent", BLUE, "-", told),
    ):
        axes.plot(tokens, values, style, color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="bytes per step")
    axes.set_title("Bytes through the controller (spmd: none)")
    axes.legend(loc="upper left", fontsize=8)
    axes.set_ylim(top=axes.get_ylim()[1] * 30)


def _draw_throughput(axes: Axes, batch: str, made: Simulated) -> None:
    nodes = sorted(made.by_nodes[PAPER])
    for (size, schedule), by_nodes in made.by_nodes.items():
        if size != batch:
            continue
        style = "-" if schedule == ASYNCHRONOUS else "--"
        for way, (color, mark) in _LOOKS.items():
            ratios = [by_nodes[one].relative(way) for one in nodes]
            axes.plot(
                nodes,
                [ratio.mean for ratio in ratios],
                mark + style,
                color=color,
                markersize=4,
                label=f"{way}, {schedule}",
            )
            known = [(one, r) for one, r in zip(nodes, ratios, strict=True) if r.half_width < 1]
            axes.fill_between(
                [one for one, _ in known],
                [ratio.low for _, ratio in known],
                [ratio.high for _, ratio in known],
                color=color,
                alpha=0.15,
                linewidth=0,
            )
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(one) for one in nodes])
    axes.minorticks_off()
    axes.set_ylim(0.75, 1.05)
    axes.set(xlabel="nodes of 8 GPUs", ylabel="throughput over that without cost")
    axes.set_title(f"Throughput by nodes: {batch}")


if __name__ == "__main__":
    main(reproduce, __doc__)
