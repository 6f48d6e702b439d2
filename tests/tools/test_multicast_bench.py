"""The bench of broadcasts: its schedules, block by block, take what the closed forms say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tools.bench.multicast import BLOCKS, WHOLE_S, Cell, arrivals_of, figures


@pytest.mark.parametrize("machines", [4, 8])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_equal_cards_take_the_closed_forms(machines: int, blocks: int) -> None:
    turns = {"chain": machines + blocks - 2, "binomial": blocks + math.log2(machines) - 1}
    for way, expected in turns.items():
        cell = Cell(way, "equal", machines, blocks)
        assert arrivals_of(cell).max() == pytest.approx(expected * WHOLE_S / blocks)


@pytest.mark.parametrize("way", ["chain", "binomial", "k-way"])
@pytest.mark.parametrize("cards", ["equal", "slow", "joiners"])
def test_a_machine_sends_what_it_has_and_gets_each_block_once(way: str, cards: str) -> None:
    cell = Cell(way, cards, 8, 16)
    held = {(source, block) for source in range(cell.sources) for block in range(16)}
    for source, target, block in sorted(cell.plan(), key=lambda sent: arrivals_of(cell)[sent[1:]]):
        assert (source, block) in held
        assert (target, block) not in held
        held.add((target, block))
    assert len(held) == 16 * (8 + (cell.joiners if way != "k-way" else 0))


def test_a_slow_card_at_the_end_of_a_chain_delays_nobody_else() -> None:
    slow, equal = (arrivals_of(Cell("chain", cards, 8, 32)) for cards in ("slow", "equal"))
    assert np.array_equal(slow[:-1], equal[:-1])
    assert (
        figures(Cell("binomial", "slow", 8, 32), arrivals_of(Cell("binomial", "slow", 8, 32)))[
            "seconds"
        ]
        > 3.5 * slow[:-1].max()
    )


def test_two_sources_give_receivers_everything_between_them_in_half_the_time() -> None:
    chain, two = (
        figures(cell, arrivals_of(cell))["together_seconds"]
        for cell in (Cell("chain", "equal", 4, 16), Cell("k-way", "sources", 4, 16))
    )
    assert two == pytest.approx(chain / 2)
