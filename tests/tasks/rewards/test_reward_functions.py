"""Reward functions in this process: the spec, the styles, the built-in scorers, every error."""

import math
import re
import textwrap
from pathlib import Path

import msgspec
import pytest

from laminar.config import ConfigError, DataConfig, resolve_config
from laminar.tasks.data.prompts import PromptRow, load_prompts
from laminar.tasks.rewards.results import (
    EXTRAS_MAX,
    FunctionSpec,
    RewardCall,
    RewardResult,
    RewardSpec,
)
from laminar.tasks.rewards.reward_functions import check_rows, open_scorer, reward_spec

CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def script(tmp_path):
    def write(source, name="reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def spec_of(path="", name="", dataset="", **reward):
    flat = {"model.name": "m", **{f"reward.{k}": v for k, v in reward.items()}}
    flat |= {"data.dataset": dataset} if dataset else {"data.train_files": ["t.jsonl"]}
    flat |= {f"reward.custom_reward_function.{k}": v for k, v in (("path", path), ("name", name))}
    return reward_spec(resolve_config(flat))


def row(prompt="2+2?", truth="4", **columns):
    return PromptRow(5, prompt, truth, columns, "sums")


def only(spec):
    (function,) = spec.functions
    return function


def dataset_spec(name, config=None):
    function = FunctionSpec("dataset", dataset=name, dataset_config=config or {})
    return RewardSpec("trajectory", [function])


def listed(*entries, **reward):
    """A run with several functions."""
    return spec_of(functions=list(entries), **reward)


def scored(spec, texts, a_row=None, step=0):
    completions = [(text, [len(text), 9]) for text in texts]
    return open_scorer(spec)(RewardCall(a_row or row(), completions, step))


def custom(script, source, texts=("four",), a_row=None, step=0):
    return scored(spec_of(script(source)), texts, a_row, step)


def fails(*parts, **settings):
    with pytest.raises(ConfigError) as caught:
        spec_of(**settings)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


# --- the spec


def test_the_kind_is_chosen_from_what_is_given(script):
    path = script("def compute_score(data_source, solution_str, ground_truth): return 1.0")
    assert only(spec_of(path)).kind == "custom"
    assert only(spec_of(path, dataset="chain_sum")).kind == "custom"
    assert only(spec_of(dataset="chain_sum")).kind == "dataset"
    assert only(spec_of()).kind == "math"
    assert only(spec_of(kind="exact")).kind == "exact"
    assert only(spec_of(dataset="chain_sum", kind="exact")).kind == "exact"


@pytest.mark.parametrize(
    ("parameters", "style", "scope"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "verl", "trajectory"),
        ("solution_str, ground_truth, method='strict'", "verl", "trajectory"),
        ("prompts, completions, **kwargs", "group", "group"),
        ("completions, state, **kwargs", "group", "group"),  # a TRL column named state
        ("completion, answer", "single", "trajectory"),
        ("state", "single", "trajectory"),
        ("states", "group", "group"),
    ],
)
def test_parameter_names_decide_style_and_scope(script, parameters, style, scope):
    spec = spec_of(script(f"def f({parameters}): return 1.0"))
    assert (only(spec).style, spec.scope, only(spec).name) == (style, scope, "f")


def test_a_group_function_may_be_used_per_trajectory(script):
    path = script("def f(completions): return [float(len(c)) for c in completions]")
    assert spec_of(path, scope="trajectory").scope == "trajectory"


def test_which_function_of_the_file(script):
    source = """
        from math import sqrt
        import json as _json
        def _helper(completion): return 0.0
        def other(completion): return 1.0
    """
    assert only(spec_of(script(source))).name == "other"
    more = textwrap.dedent(source) + "def compute_score(solution_str): return 1.0\n"
    assert only(spec_of(script(more))).name == "compute_score"
    assert only(spec_of(script(more), name="other")).name == "other"
    assert only(spec_of(script(more), name="_helper")).name == "_helper"


OBJECTS = """
    from functools import partial
    from fractions import Fraction  # a class, and of another file
    class _Scorer:
        async def __call__(self, completion, answer, **columns):
            return float(completion == answer)
    def _close(solution_str, ground_truth, extra_info, scale=1.0):
        return scale * (solution_str == ground_truth) + extra_info["base"]
    def _all(completions, weight, **columns):
        return [weight * len(c) for c in completions]
    scorer = _Scorer()
    close = partial(_close, scale=2.0, extra_info={"base": 1.0})
    lengths = partial(_all, weight=3.0)
"""


@pytest.mark.parametrize(
    ("name", "style", "scores"),
    [
        ("scorer", "single", [1.0, 0.0]),
        ("close", "verl", [3.0, 1.0]),
        ("lengths", "group", [3.0, 6.0]),
    ],
)
def test_an_object_that_can_be_called_is_a_function(script, name, style, scores):
    """An instance with __call__, or a partial: what it has bound, no row replaces."""
    spec = spec_of(script(OBJECTS), name=name)
    assert only(spec).style == style
    a_row = row(weight=9.0, extra_info={"base": 5.0})
    check_rows(spec, [a_row])
    assert [r.reward for r in scored(spec, ["4", "44"], a_row)] == scores


def test_an_object_is_what_a_file_is_about_only_without_a_function(script):
    fails("close, lengths, scorer", path=script(OBJECTS))
    with_function = textwrap.dedent(OBJECTS) + "def mine(completion): return 1.0\n"
    assert only(spec_of(script(with_function))).name == "mine"
    alone = OBJECTS.replace("close = ", "_c = ").replace("lengths = ", "_l = ")
    assert only(spec_of(script(alone))).name == "scorer"


def test_a_decorated_function_is_found_under_its_own_name(script):
    source = """
        def _wrap(f):
            def wrapper(completion): return f(completion) + 1.0
            return wrapper
        @_wrap
        def mine(completion): return 1.0
    """
    spec = spec_of(script(source))
    assert only(spec).name == "mine"
    assert scored(spec, ["x"])[0].reward == 2.0


def test_a_helper_beside_the_file_can_be_imported(script):
    script("VALUE = 7.0", "reward_helper_beside.py")
    source = "from reward_helper_beside import VALUE\ndef f(completion): return VALUE"
    assert custom(script, source)[0].reward == 7.0


def test_spec_errors(script, tmp_path):
    verl = script("def compute_score(solution_str): return 1.0", "verl.py")
    fails("gone.py", "not a file", path=str(tmp_path / "gone.py"))
    fails("notes.txt", ".py", path=script("x", "notes.txt"))
    fails("does not import", "No module named 'gone'", path=script("import gone"))
    fails(
        "does not import",
        "ValueError: boom",
        "(reward.py:1)",
        path=script("raise ValueError('boom')"),
    )
    fails("does not import", "SyntaxError", "line 1", path=script("def f(:"))
    fails("does not import", "SystemExit: 3", path=script("raise SystemExit(3)"))
    fails("'score'", "compute_score", path=verl, name="score")
    fails("'LIMIT'", "none", path=script("LIMIT = 3"), name="LIMIT")
    fails("no public function", "compute_score", path=script("LIMIT = 3"))
    fails("Mine in", "is a class", path=script("class Mine: ..."), name="Mine")
    fails("old style", "trace of a verifiers Task", path=script("def f(trace): ..."))
    fails("a, b", "name", path=script("def a(completion): ...\ndef b(completion): ..."))
    fails("f of", "text, truth", "completion", path=script("def f(text, truth): ..."))
    fails("'group'", "completions", path=verl, scope="group")
    fails("'group'", "math", scope="group")
    fails("'math'", verl, path=verl, kind="math")
    fails("data.dataset", kind="dataset")


# --- several functions


LENGTH = "def length(completion): return {'score': float(len(completion)), 'words': 1, 'pred': 'p'}"
FORMAT = "def form(completion): return 1.0 if completion.startswith('4') else 0.0"


def test_several_functions_are_one_weighted_sum_and_each_has_its_own_figure(script):
    """A built-in scorer and two of the user's: what each gave is kept under its name."""
    spec = listed(
        {"path": script(LENGTH, "a.py"), "weight": 0.5},
        {"path": script(FORMAT, "b.py"), "name": "form", "weight": 2.0},
        {"name": "math", "weight": 0},
    )
    (result,) = scored(spec, ["4"])
    assert (result.reward, result.reason) == (0.5 * 1 + 2.0 * 1, "ok")
    assert result.extras == {
        "length": 1.0, "form": 1.0, "math": 1.0, "length/words": 1.0, "length/pred": "p",
    }  # fmt: skip


def test_one_listed_function_is_what_the_older_keys_name(script):
    path = script(LENGTH)
    assert listed({"path": path}) == spec_of(path)
    assert listed({"name": "math"}) == spec_of()
    (result,) = scored(listed({"path": path, "weight": 3}), ["ab"])
    assert (result.reward, result.extras) == (6.0, {"words": 1.0, "pred": "p"})


def test_a_function_that_does_not_apply_is_left_out_of_the_sum(script):
    none = script("def none(completion): return None", "none.py")
    (result,) = scored(listed({"path": none}, {"path": script(LENGTH), "weight": 2}), ["abc"])
    assert (result.reward, result.reason, "none" in result.extras) == (6.0, "ok", False)
    other = script("def other(completion): return None", "other.py")
    (result,) = scored(listed({"path": none}, {"path": other}), ["abc"])
    assert (result.reward, result.reason) == (None, "unscored")


def test_an_answer_on_which_one_of_several_functions_fails_has_no_sum(script):
    """Its weight in the sum is unknown; the failure says whose it is."""
    broken = script("def broken(completion): raise KeyError('x')", "broken.py")
    (result,) = scored(listed({"path": script(LENGTH)}, {"path": broken}), ["abc"])
    assert (result.reward, result.reason) == (None, "error")
    assert result.detail == "broken: KeyError: 'x' (broken.py:1)"
    assert result.extras["length"] == 3.0


def test_a_sum_that_is_no_finite_number_is_a_failure(script):
    huge = script("def huge(completion): return 1e308", "huge.py")
    (result,) = scored(listed({"path": huge, "weight": 1e10}), ["a"])
    assert (result.reward, result.reason) == (None, "not-a-number")


def test_with_a_group_function_all_of_them_get_the_group(script):
    group = script("def ranks(completions): return [float(i) for i in range(len(completions))]")
    single = script(LENGTH, "single.py")
    spec = listed({"path": group, "weight": 10}, {"path": single})
    assert spec.scope == "group"
    assert [r.reward for r in scored(spec, ["a", "bb", "ccc"])] == [1.0, 12.0, 23.0]


def test_functions_of_one_name_are_told_apart_by_their_files(script):
    one, two = script("def f(completion): return 1", "one.py"), script(FORMAT, "two.py")
    other = script("def f(completion): return 2", "other.py")
    spec = listed({"path": one}, {"path": two}, {"path": other})
    assert [f.label for f in spec.functions] == ["one.f", "form", "other.f"]


def test_list_errors(script):
    path = script(LENGTH)
    fails("length", "twice", functions=[{"path": path}, {"path": path}])
    fails("'style'", "no path", "math", functions=[{"name": "style"}])
    fails("reward.functions", "reward.kind", functions=[{"name": "math"}], kind="exact")
    fails("custom_reward_function", functions=[{"name": "math"}], path=path)
    fails("weights [0.0]", functions=[{"name": "math", "weight": 0}])
    fails("weights [inf]", functions=[{"name": "math", "weight": math.inf}])
    fails("path, name and weight", functions=[{"file": "a.py"}])
    fails("'group'", "length of", "the math scorer", scope="group",
          functions=[{"path": path}, {"name": "math"}])  # fmt: skip


def test_what_is_kept_beside_a_score_is_bounded(script):
    source = """
        def f(completion):
            many = {f"n{i}": i for i in range(100)}
            return {"score": 1, "pred": "x" * 1000, "list": [1], "bad": float("nan"), **many}
    """
    extras = custom(script, source)[0].extras
    assert len(extras) == EXTRAS_MAX and len(extras["pred"]) == 256
    assert not {"list", "bad"} & extras.keys() and extras["n3"] == 3.0


# --- the styles


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (
            r"return {'score': 1, 'p\ud83d': 'a\ud83d'}",
            RewardResult(1.0, extras={"p\ufffd": "a\ufffd"}),
        ),
        (
            r"return {'\ud83d': 1}",
            RewardResult(None, "not-a-number", "returned a dict without score: \ufffd"),
        ),
        (
            r"raise ValueError('\ud83d')",
            RewardResult(None, "error", "ValueError: \ufffd (reward.py:3)"),
        ),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
            RewardResult(None, "error", "Mute (reward.py:3)"),
        ),
    ],
)
def test_what_a_function_says_can_be_encoded(script, body, result):
    (found,) = custom(
        script,
        f"""
        def f(solution_str):
            {body}
    """,
    )
    assert found == result and msgspec.msgpack.encode(found)


def test_verl(script):
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert (data_source, ground_truth) == ("sums", "4"), (data_source, ground_truth)
            score, n = float(len(solution_str)), extra_info["n"]
            return {"score": score, "acc": True, "pred": "x", "n": n}
    """
    for a_row in (row(extra_info={"n": 3}), row(n=3)):
        results = custom(script, source, ["a", "bb"], a_row)
        assert [r.reward for r in results] == [1.0, 2.0]
        assert [r.reason for r in results] == ["ok", "ok"]
        assert results[0].extras == {"acc": 1.0, "pred": "x", "n": 3.0}


def test_verl_with_kwargs_gets_no_more_than_verl_gives(script):
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
            return float(len(kw))
    """
    assert custom(script, source, a_row=row(level=2))[0].reward == 0.0


def test_async_functions_share_one_event_loop(script):
    source = """
        import asyncio
        LOOPS = set()
        async def compute_score(solution_str):
            await asyncio.sleep(0)
            LOOPS.add(id(asyncio.get_running_loop()))
            return float(len(LOOPS))
    """
    assert [r.reward for r in custom(script, source, ["a", "b", "c"])] == [1.0, 1.0, 1.0]


def test_trl(script):
    source = """
        CALLS = []
        async def f(prompts, completions, completion_ids, level, answer, log_metric, log_extra,
                    trainer_state, **kwargs):
            CALLS.append(1)
            assert prompts == ["2+2?"] * 3 and level == [7] * 3 and answer == ["4"] * 3
            assert completion_ids == [[1, 9], [2, 9], [0, 9]], completion_ids
            assert kwargs["extra"] == ["e"] * 3
            log_metric("calls", len(CALLS))
            log_extra("size", [len(c) for c in completions])
            log_extra("text", completions)
            return [1, None, trainer_state.global_step]
    """
    results = custom(script, source, ["a", "bb", ""], row(level=7, extra="e"), step=12)
    assert [(r.reward, r.reason) for r in results] == [
        (1.0, "ok"),
        (None, "unscored"),
        (12.0, "ok"),
    ]
    assert [r.extras for r in results] == [
        {"calls": 1.0, "size": float(len(text)), "text": text} for text in ("a", "bb", "")
    ]


def test_trl_completions_are_messages_when_the_prompt_is(script):
    source = """
        def f(prompts, completions):
            assert prompts[0] == [{"role": "user", "content": "2+2?"}]
            return [float(c == [{"role": "assistant", "content": "four"}]) for c in completions]
    """
    assert custom(script, source, a_row=row(CHAT))[0].reward == 1.0
    assert (
        custom(script, "def f(completions): return [float(completions == ['four'])]")[0].reward == 1
    )


def test_a_column_wins_over_the_name_that_every_row_has(script):
    source = "def f(completions, answer, answers): return [answer[0] + answers[0]]"
    found = custom(script, source, a_row=row(answer=1.0, answers=2.0))
    assert found[0].reward == 3.0


def test_verifiers(script):
    source = """
        async def f(prompt, completion, answer, state, info, task):
            assert state["answer"] == answer == "4" and task == "sums"
            assert state["completion"] == completion
            return info["points"] * (completion[0]["content"] == "four")
    """
    results = custom(script, source, ["four", "five"], row(CHAT, info={"points": 0.5}))
    assert [r.reward for r in results] == [0.5, 0.0]


def test_verifiers_group(script):
    source = """
        def f(completions, answers, states, infos, tasks):
            assert [len(x) for x in (answers, infos, tasks)] == [2, 2, 2]
            assert tasks[0] == "sums"
            return [float(s["completion"] == c and a == "4")
                    for s, c, a in zip(states, completions, answers)]
    """
    assert [r.reward for r in custom(script, source, ["a", "b"])] == [1.0, 1.0]


def test_columns_come_as_they_were_in_the_data(script):
    source = """
        def f(completion, pair, table):
            return float(pair == (1, 2) and table == {1: "a"})
    """
    marked = row(pair={"!tuple": [1, 2]}, table={"!pairs": [[1, "a"]]})
    assert custom(script, source, a_row=marked)[0].reward == 1.0


# --- what a function may not do


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("raise ValueError('boom\\nmore')", "ValueError: boom (reward.py:3)"),
        ("raise KeyError", "KeyError (reward.py:3)"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("import json; json.loads('{')", "(reward.py:3)"),
    ],
)
def test_what_a_function_raises_is_an_error_of_the_function(script, body, detail):
    (result,) = custom(script, f"\ndef f(completion):\n    {body}")
    assert (result.reward, result.reason) == (None, "error")
    assert detail in result.detail
    assert len(result.detail) <= 240 and "\n" not in result.detail


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("np.float32('nan')", "nan"),
        ("'1.0'", "str"),
        ("np.str_('1.0')", "str"),
        ("[1.0]", "list"),
        ("1j", "complex"),
        ("10 ** 400", "int"),
        ("{'acc': 1.0}", "without score: acc"),
        ("{'score': float('nan')}", "nan"),
        ("{'score': '1'}", "str"),
        ("np.array([0.5, 1.0])", "ndarray"),
        ("np.array([])", "ndarray"),
        ("(1.0, 2.0)", "tuple"),
        ("('1', {})", "str"),
    ],
)
def test_what_is_not_a_finite_number_is_an_error_of_its_own(script, value, detail):
    """Nothing is made a number that is none: a string would train as a score, NaN as any."""
    (result,) = custom(script, f"import numpy as np\ndef f(completion):\n    return {value}")
    assert (result.reward, result.reason) == (None, "not-a-number")
    assert detail in result.detail
    assert len(result.detail) <= 240 and "\n" not in result.detail


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ("True", 1.0),
        ("2", 2.0),
        ("Fraction(1, 4)", 0.25),
        ("np.float32(0.5)", 0.5),
        ("np.float64(0.5)", 0.5),
        ("np.int64(-3)", -3.0),
        ("np.bool_(True)", 1.0),
        ("np.array(0.5)", 0.5),
        ("np.array([0.5])", 0.5),
        ("np.array([[7]])", 7.0),
        ("torch.tensor(0.5)", 0.5),
        ("torch.tensor([0.5], requires_grad=True)", 0.5),
        ("torch.tensor(0.5, dtype=torch.bfloat16)", 0.5),
        ("torch.tensor([True])", 1.0),
    ],
)
def test_a_number_is_a_number_of_any_kind(script, value, score):
    source = (
        "from fractions import Fraction\nimport numpy as np\nimport torch\n"
        f"def f(solution_str): return {value}"
    )
    assert custom(script, source)[0] == RewardResult(score)


def test_a_score_may_come_with_a_dict(script):
    source = (
        "import numpy as np\ndef f(completion): return np.float32(0.5), {'words': 2, 'pred': 'x'}"
    )
    assert custom(script, source)[0] == RewardResult(0.5, "ok", "", {"words": 2.0, "pred": "x"})
    found = custom(script, "def f(completions): return [(1, {'n': 2}), {'score': 3, 'n': 4}]", "ab")
    assert [(r.reward, r.extras) for r in found] == [(1.0, {"n": 2.0}), (3.0, {"n": 4.0})]


@pytest.mark.parametrize(
    "value",
    [
        "torch.tensor([1.0, 2.0], requires_grad=True)",
        "torch.tensor([[1.0], [2.0]])",
        "np.array([1, 2])",
        "[np.float64(1), torch.tensor([2.0])]",
        "(torch.tensor(1), np.array([2]))",
    ],
)
def test_a_group_function_may_give_an_array(script, value):
    source = f"import numpy as np\nimport torch\ndef f(completions): return {value}"
    assert [r.reward for r in custom(script, source, ["a", "b"])] == [1.0, 2.0]


EXAMPLES = (Path(__file__).parents[3] / "docs" / "data_and_rewards.md").read_text()


@pytest.mark.parametrize("prompt", ["2+2?", CHAT], ids=["text", "messages"])
@pytest.mark.parametrize(
    ("name", "scores"),
    [("compute_score", [1.0, 0.0]), ("length_reward", [-0.04, -0.03]), ("is_right", [1.0, 0.0])],
)
def test_the_examples_of_the_page_score_text_and_messages(script, prompt, name, scores):
    (source,) = re.findall(r"```python\n(.*?)```", EXAMPLES, re.DOTALL)
    for truth in ("4", 4):
        found = scored(spec_of(script(source), name=name), ["is 4", "abc"], row(prompt, truth))
        assert [r.reward for r in found] == scores, found


def test_one_bad_response_leaves_its_siblings_alone(script):
    source = "def f(completion): return 1.0 / len(completion)"
    assert [r.reason for r in custom(script, source, ["a", "", "b"])] == ["ok", "error", "ok"]
    source = "def f(completions): return [1.0, float('nan'), '2']"
    assert [r.reason for r in custom(script, source, "abc")] == ["ok"] + ["not-a-number"] * 2


def test_none_is_unscored(script):
    assert custom(script, "def f(completion): return None")[0].reason == "unscored"
    found = custom(script, "def f(completion): return {'score': None, 'n': 2}")[0]
    assert (found.reward, found.reason, found.extras) == (None, "unscored", {"n": 2.0})


@pytest.mark.parametrize("value", ["1.0", "[1.0]", "[1.0] * 3", "None", "{'score': 1.0}"])
def test_a_group_function_gives_one_score_per_sibling(script, value):
    results = custom(script, f"def f(completions): return {value}", ["a", "b"])
    assert [r.reason for r in results] == ["wrong-length", "wrong-length"]
    assert "2 completions" in results[0].detail and "reward" not in results[0].detail


# --- rows that could never be scored


def refused(spec, a_row, *parts):
    with pytest.raises(ConfigError) as caught:
        check_rows(spec, [a_row])
    for part in ("row 5", *parts):
        assert part in str(caught.value)


def test_rows_are_checked_against_the_parameters(script):
    spec = spec_of(script("def f(completions, level, bonus=1): return 1.0"))
    check_rows(spec, [row(level=1)])
    refused(spec, row(levels=1), "'level'", "levels")
    areal = script("def f(prompt, completions, prompt_ids, completion_ids, answer): return 1.0")
    refused(spec_of(areal), row(), "'prompt'")
    verl = spec_of(script("def compute_score(solution_str, ground_truth, mode): return 1.0"))
    refused(verl, row(mode="x"), "'mode'")
    check_rows(spec_of(script("def f(completion, **kwargs): return 1.0")), [row()])


def test_rows_are_checked_for_an_answer():
    for kind in ("math", "exact"):
        check_rows(spec_of(kind=kind), [row(truth="4"), row(truth=4), row(truth=0.5)])
        for truth in (None, ["4"], True):
            refused(spec_of(kind=kind), row(truth=truth), "data.answer_key")


def test_rows_are_checked_for_the_dataset_item():
    spec = spec_of(dataset="chain_sum")
    check_rows(
        spec, load_prompts(DataConfig(dataset="chain_sum", dataset_size=2, val_size=0)).train
    )
    refused(spec, row(), "chain_sum", "reward.kind")


# --- built-in scorers


@pytest.mark.parametrize(
    ("truth", "text", "score"),
    [
        ("1/2", "0.5", 1.0),
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        ("0.5", "<answer>1/2</answer>", 1.0),
        ("7", "8", 0.0),
        (42, "the answer is 42", 1.0),
        ("first 40 then 2 more\n#### 42", r"\boxed{42}", 1.0),
        (r"The final answer is $9$ + $3$, or $\boxed{12}$.", r"\boxed{12}", 1.0),
        (r"The final answer is $9$ + $3$, or $\boxed{12}$.", r"\boxed{9}", 0.0),
        ("x^2+1", r"\boxed{1+x^2}", 1.0),
        ("x^2+1", "<answer>1 + x^2</answer>", 1.0),
        ("x^2+1", r"\boxed{2+x^2}", 0.0),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", 1.0),
        ("1/2", "", 0.0),
        ("1/2", "no idea", 0.0),
        ("1/2", r"\boxed{\frac{1}{}", 0.0),
        ("5", "<answer>5</answer> no, <answer>6</answer>", 0.0),
        # words are text, not products of their letters
        ("no", r"\boxed{on}", 0.0),
        (r"\text{left}", r"so $\boxed{\text{felt}}$", 0.0),
        ("left", "it is $felt$", 0.0),
        ("the cat", "<answer>cat the</answer>", 0.0),
        ("evil, live", r"\boxed{vile, live}", 0.0),
        ("evil, live", r"\boxed{live, evil}", 1.0),
        ("north east", r"\boxed{north west}", 0.0),
        (r"\sqrt{no}", r"\boxed{\sqrt{on}}", 0.0),
        ("不是", r"\boxed{是不}", 0.0),
        ("Yes", r"\boxed{\text{yes}.}", 1.0),
        ("True", "<answer>true</answer>", 1.0),
        ("yes", "it is $yes$", 1.0),
        ("5 m", r"\boxed{5 s}", 0.0),
        (r"\frac{1}{2} m", r"\boxed{1/2 \text{ s}}", 0.0),
        ("5 minutes", r"\boxed{5 hours}", 0.0),
        ("5 m", r"\boxed{5.0\,\mathrm{m}}", 1.0),
        ("5 m", r"\boxed{5}", 1.0),
        ("2xy+c", r"\boxed{c+2xy}", 1.0),
        ("ab", r"\boxed{b \cdot a}", 1.0),
        (r"\sin ab", r"\boxed{\cos ab}", 0.0),
        (r"1 \text{ or } 2", r"\boxed{x=2 \text{ or } x=1}", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", 1.0),
    ],
)
def test_math(truth, text, score):
    (result,) = scored(RewardSpec("trajectory", [FunctionSpec("math")]), [text], row(truth=truth))
    assert (result.reward, result.reason) == (score, "ok"), result.detail


def test_a_ground_truth_that_is_no_mathematics_is_an_error_not_a_zero():
    (result,) = scored(RewardSpec("trajectory", [FunctionSpec("math")]), ["1"], row(truth=""))
    assert (result.reward, result.reason) == (None, "error")
    assert "ground truth" in result.detail


def test_a_slow_parse_is_a_timeout(monkeypatch):
    import math_verify
    from math_verify.errors import TimeoutException

    def slow(*_args, **_kwargs):
        raise TimeoutException

    spec = RewardSpec("trajectory", [FunctionSpec("math")])
    monkeypatch.setattr(math_verify, "verify", slow)
    assert scored(spec, ["4"])[0].reason == "timeout"
    parse = math_verify.parse
    monkeypatch.setattr(math_verify, "parse", lambda text, **kw: slow() if kw else parse(text))
    assert scored(spec, ["4"])[0].reason == "timeout"


def test_exact():
    spec = RewardSpec("trajectory", [FunctionSpec("exact")])
    texts = [
        " 4\n",
        "4.",
        "so <answer> 4 </answer>.",
        "<answer>4</answer><answer>5</answer>",
        "five",
    ]
    assert [r.reward for r in scored(spec, texts)] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert scored(spec, ["4"], row(truth=4))[0].reward == 1.0
    assert scored(spec, ["a\nb"], row(truth="a\nb "))[0].reward == 1.0


@pytest.mark.parametrize(
    "name",
    ["chain_sum", "spell_backward", "countdown", "rearc", "knights_knaves", "calendar_arithmetic"],
)
def test_the_answer_of_a_dataset_item_scores_one(name):
    data = DataConfig(dataset=name, dataset_size=3, val_size=0)
    scorer = open_scorer(dataset_spec(name))
    for a_row in load_prompts(data).train:
        a_row = msgspec.msgpack.decode(msgspec.msgpack.encode(a_row), type=PromptRow)
        right = (f"thinking <answer>{a_row.ground_truth}</answer>", [])
        results = scorer(RewardCall(a_row, [right, ("no tags", [])]))
        assert [r.reason for r in results] == ["ok", "ok"]
        assert math.isclose(results[0].reward, 1.0)
        assert results[1].reward < 0.1


def test_dataset_settings_reach_the_scorer():
    parts = [{"name": "letter_counting", "weight": 1.0, "config": {}}]
    config = {"datasets": parts}
    data = DataConfig(dataset="composite", dataset_config=config, dataset_size=2, val_size=0)
    spec = dataset_spec("composite", config)
    for a_row in load_prompts(data).train:
        assert scored(spec, [f"<answer>{a_row.ground_truth}</answer>"], a_row)[0].reward == 1.0
