"""Write what transformers takes for what a configuration leaves out.

    python -m tools.model_families

A saved model of several modalities leaves out of its `text_config` what equals the default of the
family: Gemma 3 has no `vocab_size`. The kinds of layers are written as the pattern that repeats.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from simulator.catalogue.huggingface_config import FAMILIES_FILE, PATTERN_KINDS, READ_FIELDS

_LAYERS: Final = 24
_LONGEST_PATTERN: Final = 8


def families() -> dict[str, dict[str, Any]]:
    """The defaults of each family of decoders, by its `model_type` without `_text`."""
    found = {}
    for name in sorted(CONFIG_MAPPING):
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not name.endswith("_text"):
            continue
        kind = CONFIG_MAPPING[name]
        given = {one.name: one.default for one in dataclasses.fields(kind)}
        fields: dict[str, Any] = {
            key: value
            for key, value in given.items()
            if key in READ_FIELDS and isinstance(value, int)
        }
        if given.get("layer_types", 0) is None and (pattern := _pattern(kind)):
            fields["layer_types"] = pattern
        if "vocab_size" in fields:
            found[name.removesuffix("_text")] = fields
    return found


def text(of: dict[str, dict[str, Any]]) -> str:
    """The content of the file, one family a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in of.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _pattern(kind: Any) -> list[str]:
    """The kinds of layers that repeat; empty if no layer has a window or chooses what it sees."""
    kinds = kind(num_hidden_layers=_LAYERS).layer_types or []
    if PATTERN_KINDS >= set(kinds) != {"full_attention"}:
        for period in range(1, _LONGEST_PATTERN + 1):
            if kinds == (kinds[:period] * _LAYERS)[:_LAYERS]:
                return kinds[:period]
    return []


if __name__ == "__main__":
    FAMILIES_FILE.write_text(text(families()), encoding="utf-8")
