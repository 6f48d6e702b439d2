"""The end of a turn by its text, however the text is split into tokens."""

import random

import pytest

from laminar.tasks.environments.stop_strings import StopStrings, cut_text
from tools.kit.tool_models import tokenizer

PIECES = ["ab", "b", "é", "二", "\n\n", "Ob", "servation", ":", " ", "<s>"]
STOPS = (["Observation:"], ["é二"], ["b\n", "  "], ["b"], ["\n\nOb", "<s>"])


@pytest.mark.parametrize("seed", range(60))
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(seed):
    draws, model = random.Random(seed), tokenizer()
    text = "".join(draws.choices(PIECES, k=40))
    ids, strings = model.encode(text, add_special_tokens=False), draws.choice(STOPS)
    ends = (n for n in range(1, len(ids) + 1) if any(s in model.decode(ids[:n]) for s in strings))
    end = next(ends, None)
    done = draws.randrange(end or len(ids))  # by another replica
    search = StopStrings(strings, model.decode, ids[:done])
    assert not search.is_found
    found, at = None, done
    while at < len(ids) and found is None:
        few = ids[at : at + draws.randint(1, 4)]
        if (kept := search.find_end(few)) is not None:
            found = at + kept
        at += len(few)
    assert found == end and search.is_found == (end is not None)
    if end is not None:
        assert StopStrings(strings, model.decode, ids[:end]).is_found
        before, string = cut_text(model.decode(ids[:end]), strings)
        assert string in strings and not any(s in before for s in strings)


def test_the_first_stop_string_cuts_a_text():
    assert cut_text("one two three", ["three", "two"]) == ("one ", "two")
    assert cut_text("one", ["two"]) == ("one", None) == cut_text("one", [])
