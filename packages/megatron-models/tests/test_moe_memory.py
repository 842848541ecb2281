"""Bytes that experts save for the backward pass, by hand: rows, indices, and copies in float32."""

import pytest
from megatron_models import LayerPass, SavedBytes
from megatron_models.components.mixer import ExpertParallelism
from megatron_models.components.moe.activations import expert_activations
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import RecomputeConfig

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
HALF = {"moe_expert_capacity_factor": 0.5}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
ROOM = {"moe_expert_rank_capacity_factor": 1.5}
TOKENS, CHOICES, WIDTH = 24, 48, 24 * 4
"""Tokens of a micro-batch, the selections of two experts each, and the bytes of a token."""


def saved(small, changes, size=4, **options):
    layer_pass = LayerPass(8, 3, SavedBytes(size), experts=ExpertParallelism(**options))
    return expert_activations(small(**EXPERTS, **changes).component(MoESpec), layer_pass)


def of_rows(rows, ranks=1, tail=False):
    """Returns the bytes of rows in experts of 32 channels, and of offsets of each expert.

    Of a row: both inputs, the activation's, the index of its bias in two products, and whether it
    is of an expert in two clearings of the tail.
    """
    row = (24 + 32 + 32) * 4 + 2 * 8 + (2 if tail else 0)
    return rows * row + 2 * 4 * 4 // ranks


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, CHOICES),
        (HALF, CHOICES // 2),
        (PADDED, CHOICES),
        ({**PADDED, "moe_expert_capacity_factor": 1.25}, CHOICES * 5 // 4),
        ({"moe_expert_rank_capacity_factor": 0.75}, CHOICES * 3 // 4),
        (ROOM, CHOICES),
    ],
)
def test_one_rank_saves_the_rows_that_its_experts_compute(small, changes, rows):
    found = saved(small, changes)
    assert found["experts"] == of_rows(rows)
    assert found["router"] == CHOICES * (8 + 4) + TOKENS * 4 * 4
    # The choice of each row and its output; with a bound the weights too, and whether it is kept.
    bounded = CHOICES * 4 + 1 if "moe_expert_rank_capacity_factor" in changes else 0
    assert found[""] == CHOICES * 8 + min(rows, CHOICES) * WIDTH + bounded


@pytest.mark.parametrize("changes", [{}, HALF, PADDED, ROOM])
def test_one_rank_sends_nothing_with_any_dispatcher(small, changes):
    alone = saved(small, changes, ep=1, expert_tp=1, dispatcher="alltoall")
    assert alone == saved(small, changes, ep=1, expert_tp=1, dispatcher="allgather")


@pytest.mark.parametrize(
    ("dispatcher", "changes", "rows", "tail"),
    [
        ("allgather", {}, 2 * TOKENS * 2, True),  # all tokens of both ranks, for both experts
        ("allgather", HALF, CHOICES // 2, True),
        ("allgather", PADDED, CHOICES, False),
        ("alltoall", {}, CHOICES, False),
        ("alltoall", HALF, CHOICES // 2, False),
        ("alltoall", PADDED, CHOICES, False),
        ("alltoall", ROOM, 2 * 36, True),  # 36 of 48 choices for each rank
    ],
)
def test_two_ranks_save_the_rows_that_they_receive(small, dispatcher, changes, rows, tail):
    found = saved(small, changes, ep=2, expert_tp=1, dispatcher=dispatcher)
    assert found["experts"] == of_rows(rows, 2, tail)


@pytest.mark.parametrize(
    ("changes", "slots", "returned", "more"),
    [
        ({}, CHOICES, CHOICES, 0),
        (HALF, CHOICES, CHOICES // 2, 0),
        (PADDED, CHOICES, CHOICES, 0),
        (ROOM, 72, 72, CHOICES * 4 + 1),
    ],
)
def test_rows_that_are_sent_are_sorted_twice_where_they_arrive(
    small, changes, slots, returned, more
):
    """An index for each sent row, and two for each received one; all return to their rank."""
    found = saved(small, changes, ep=2, expert_tp=1, dispatcher="alltoall")
    assert found[""] == (2 * returned + slots) * 8 + returned * WIDTH + more


def test_gathered_choices_have_their_weights(small):
    found = saved(small, {}, ep=2, expert_tp=1)
    assert found[""] == 2 * CHOICES * (4 + 8) + 2 * TOKENS * 2 * WIDTH


def test_lower_precisions_save_tokens_and_weights_of_the_router_in_float32(small):
    found = saved(small, {"moe_shared_expert_intermediate_size": 16}, size=2)
    assert found["router"] == CHOICES * (8 + 4) + TOKENS * 4 * 4 + (TOKENS + 4) * 24 * 4
    assert found["shared"] == TOKENS * (16 + 16) * 2
    assert saved(small, {}, size=8)["experts"] == CHOICES * (88 * 8 + 16)  # experts in a loop


@pytest.mark.parametrize(
    ("size", "changes", "modules", "reader", "converts"),
    [
        (2, {}, (), None, True),
        (2, {"moe_shared_expert_intermediate_size": 16}, (), "up", True),
        (4, {}, (), "up", False),
        (2, {}, ("moe",), "up", False),
        (2, {}, ("mlp",), None, True),
    ],
)
def test_the_input_is_saved_where_no_copy_is(small, size, changes, modules, reader, converts):
    spec = small(**EXPERTS, **changes).component(MoESpec)
    plan = RecomputeConfig("selective", modules=modules) if modules else RecomputeConfig()
    layer_pass = LayerPass(8, 3, SavedBytes(size), recompute=plan)
    assert (spec.input_saved_by(layer_pass), spec.converts_input(layer_pass)) == (reader, converts)
    assert (spec.activations(layer_pass) == {}) == (modules == ("moe",))
