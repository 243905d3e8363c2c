"""What users write about engines and trainers: read, refused, and written again."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.config.load import load_config
from areal_lab.resolve.allocation import (
    ENGINES,
    TRAINERS,
    Allocation,
    EnginePlan,
    Part,
    Sizes,
    layout_of,
    parse_allocation,
    parse_backend,
)

SIZES = st.builds(
    Sizes,
    **{name: st.integers(1, 64) for name in ("data", "tensor", "pipeline", "context", "expert")},
)
ENGINE_PARTS = st.builds(Part, st.sampled_from(ENGINES), SIZES)
TRAINER_PARTS = st.builds(Part, st.sampled_from(TRAINERS), SIZES) | st.builds(
    Part, st.just("megatron"), SIZES, SIZES
)
ALLOCATIONS = st.one_of(
    st.builds(Allocation, engines=ENGINE_PARTS),
    st.builds(Allocation, trainer=TRAINER_PARTS),
    st.builds(Allocation, engines=ENGINE_PARTS, evaluation_only=st.just(True)),
    st.builds(Allocation, engines=ENGINE_PARTS, trainer=TRAINER_PARTS, shared=st.booleans()),
)


@given(ALLOCATIONS)
def test_the_text_of_an_allocation_parses_to_the_same(allocation: Allocation) -> None:
    assert parse_allocation(str(allocation)) == allocation


@given(st.data(), ENGINE_PARTS, TRAINER_PARTS)
def test_order_dots_and_blanks_do_not_matter(
    data: st.DataObject, engines: Part, trainer: Part
) -> None:
    def spelled(sizes: Sizes) -> str:
        letters = {name[0]: getattr(sizes, name) for name in Sizes.__dataclass_fields__}
        order = data.draw(st.permutations(sorted(letters)))
        return "".join(f"{letter}{letters[letter]}" for letter in order)

    mark, gap = data.draw(st.sampled_from([".", ":"])), data.draw(st.sampled_from(["", " "]))
    end = f"{trainer.backend}:{spelled(trainer.sizes)}"
    if trainer.expert_layers is not None:
        layers = f"attn:{spelled(trainer.sizes)}|ffn:{spelled(trainer.expert_layers)}"
        end = f"{trainer.backend}:({layers})"
    text = f"{engines.backend}{mark}{spelled(engines.sizes)}{gap}+{gap}{end}"
    assert parse_allocation(text) == Allocation(engines=engines, trainer=trainer)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("sglang:d4+fsdp:d2", "sglang:d4+fsdp:d2"),
        ("sglang.d4p1t1+d4p1t1", "sglang:d4+fsdp:d4"),
        ("vllm:d2t4+megatron:d2p2t1", "vllm:d2t4+megatron:d2p2"),
        ("sglang.d4p1t1+eval", "sglang:d4+eval"),
        ("d2p2t1", "megatron:d2p2"),
        ("d2t4c4", "fsdp:d2t4c4"),
        ("sglang.d4p2t2", "sglang:d4t2p2"),
        ("attn:d4p2t2c2|ffn:d2p2t4e2", "megatron:(attn:d4t2p2c2|ffn:d2t4p2e2)"),
        ("sglang:d4|fsdp:d4", "sglang:d4|fsdp:d4"),
        ("sglang:t2", "sglang:d1t2"),
    ],
)
def test_every_form_of_areal_is_parsed(text: str, plain: str) -> None:
    assert str(parse_allocation(text)) == plain


def test_devices_are_the_product_without_experts() -> None:
    """The example of AReaL's own tests: d2 p2 t4 e2 c4 takes 64 devices."""
    trainer = parse_allocation("d2p2t4e2c4").trainer
    assert trainer is not None
    assert trainer.sizes.devices == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has sizes '', but each size must be a letter and a number"),
        ("sglang", "'sglang' has sizes 'sglang'"),
        ("sglang:", "has sizes ''"),
        ("sglang:d0", "has d0, but sizes are >= 1"),
        ("sglang:d1000000", "has d1000000, but sizes have at most 6 digits"),
        pytest.param("fsdp:d" + "9" * 5000, "but sizes have at most 6 digits", id="5000 digits"),
        ("sglang:d2d3", "has d twice in 'd2d3'"),
        ("sglang:x2", "has x2; sizes are d (data), t (tensor)"),
        ("sglang:d-2", "has a part 'sglang:d-2' that is not backend:sizes"),
        (
            "sglng:d2+fsdp:d1",
            f"has an unknown backend 'sglng'; known are {', '.join(ENGINES)}",
        ),
        ("fsdp:d2+sglang:d1", "must name an engine first and a trainer second"),
        ("sglang:d2+vllm:d1", "must name an engine first and a trainer second"),
        ("sglang:d1+fsdp:d1+fsdp:d1", "has more than two parts"),
        ("sglang:d1|fsdp:d1|fsdp:d1", "has more than two parts"),
        ("fsdp:d1+eval", "must name an engine before +eval"),
        ("megatron:(attn:d1|ffn:d1", "has an unbalanced parenthesis"),
        ("megatron:(d1)", "which is not (attn:sizes|ffn:sizes)"),
        (
            "fsdp:(attn:d1|ffn:d1)",
            "has separate sizes for experts in fsdp; only megatron supports them",
        ),
    ],
)
def test_text_that_cannot_be_parsed_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        parse_allocation(text)
    assert "\n" not in str(refusal.value)


@given(st.text(alphabet="sglanvfdpteco:.+|()0123 ", max_size=24))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        allocation = parse_allocation(text)
    except ValueError:
        return
    assert parse_allocation(str(allocation)) == allocation


@pytest.mark.parametrize(
    ("text", "backend", "sizes"),
    [
        ("sglang", "sglang", None),
        ("vllm.d3", "vllm", Sizes(data=3)),
        ("embedded:d2t1", "embedded", Sizes(data=2)),
    ],
)
def test_a_backend_may_have_sizes(text: str, backend: str, sizes: Sizes | None) -> None:
    assert parse_backend(text) == (backend, sizes)


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        ([], EnginePlan(backend="embedded", servers=1)),
        (["rollout.engines=3"], EnginePlan(backend="embedded", servers=3)),
        (["rollout.backend=sglang"], EnginePlan(backend="sglang", servers=1)),
        (["rollout.backend=sglang:d2t1"], EnginePlan(backend="sglang", servers=2)),
        (
            ["rollout.backend=sglang:d2t4"],
            EnginePlan(backend="sglang", servers=2, tensor_parallel=4),
        ),
        (["allocation_mode=vllm:d4+fsdp:d2"], EnginePlan(backend="vllm", servers=4)),
        (["allocation_mode=fsdp:d1"], EnginePlan(backend="embedded", servers=1)),
        (
            ["allocation_mode=sglang:d2", "rollout.backend=sglang", "rollout.engines=2"],
            EnginePlan(backend="sglang", servers=2),
        ),
    ],
)
def test_one_plan_from_several_settings(overrides: list[str], plan: EnginePlan) -> None:
    assert layout_of(load_config(None, overrides)).engines == plan


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.backend=sglan"], "did you mean 'sglang'?"),
        (["rollout.backend=sglang:d2", "rollout.engines=3"], "2 servers, but rollout.engines is 3"),
        (
            ["allocation_mode=sglang:d2", "rollout.backend=vllm"],
            "are different engines; remove one of the settings",
        ),
        (
            ["allocation_mode=sglang:d2", "rollout.backend=sglang:d3"],
            "are different engines; remove one of the settings",
        ),
        (["allocation_mode=nonsense"], "allocation_mode: 'nonsense' has sizes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        layout_of(load_config(None, overrides))
