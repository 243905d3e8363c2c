"""`docs/losses.md`: what a config can name as loss, as advantages and as their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from areal_lab.config.shipped import recipes
from areal_lab.training.objective.formula_index import markdown_lists

PAGE: Final = Path(__file__).parents[2] / "docs" / "losses.md"
_HEAD: Final = """# Losses and advantages by name

A config names its loss and its advantages, with their keywords:

```yaml
actor:
  loss: {name: gspo, clip_epsilon: [3e-4, 4e-4]}
  advantage: {name: rloo}
```

`areal-lab train tiny actor.loss.name=gspo actor.loss.clip_epsilon=[3e-4,4e-4]` does the same. A
name alone (`actor.loss=gspo`) takes the function's defaults. [Choose a loss in the
YAML](train.md#choose-a-loss-in-the-yaml) explains how to combine names, files and recipes. [The
functional core](functional/README.md) has the formulas. The trainer sets keywords for counts,
sequences or versions of the batch; they are not listed.
"""


def page() -> str:
    """The page as it should be."""
    return "\n\n".join([_HEAD.strip(), _recipes(), markdown_lists()]) + "\n"


def _recipes() -> str:
    lines = [
        "## Recipes",
        "",
        "Use a recipe as `areal-lab train tiny NAME`, or as `base: [tiny, NAME]` in a file.",
        "",
    ]
    lines += ["| recipe | meaning |", "|---|---|"]
    for name, path in recipes().items():
        head = path.read_text(encoding="utf-8").partition("\n\n")[0]
        about = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
        lines.append(f"| `{name}` | {about} |")
    return "\n".join(lines)
