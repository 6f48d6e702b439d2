"""A user's loss or estimator is tried before a run: what is right passes, each mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.config import Config, ConfigError
from laminar.launch.preflight import check_functions
from laminar.run.user_file import file_digests
from laminar.training.function_check import try_functions
from laminar.training.learner import Learner
from laminar.training.model.policy import LoadedPolicy

Make = Callable[..., Config]
ROOT = Path(__file__).parents[2]
LOSS, ESTIMATOR = "algorithm.policy_loss.loss_mode", "algorithm.adv_estimator"

RIGHT = """
def my_loss(batch):
    return -batch.advantages * batch.log_probs

def of_sequences(batch):
    return -batch.advantages * batch.means(batch.log_ratio).exp() * batch.options["scale"]

def my_advantages(batch):
    return batch.rewards - batch.group_means(batch.rewards) + 0.1 * batch.extras["format"]
"""


@pytest.fixture
def refused(tmp_path: Path, make_config: Make) -> Callable[[str, str], str]:
    def sentence(key: str, body: str) -> str:
        path = tmp_path / "my.py"
        path.write_text(f"def mine(batch):\n    {body}\n")
        with pytest.raises(ConfigError) as caught:
            try_functions(make_config({key: f"{path}:mine"}).algorithm)
        assert f"{key}: mine of {path} " in str(caught.value)
        return str(caught.value)

    return sentence


def test_right_functions_pass(tmp_path: Path, make_config: Make) -> None:
    (tmp_path / "my.py").write_text(RIGHT)
    for name in ("my_loss", "of_sequences"):
        keys = {
            LOSS: f"{tmp_path}/my.py:{name}",
            "algorithm.policy_loss.options": {"scale": 2.0},
            ESTIMATOR: f"{tmp_path}/my.py:my_advantages",
        }
        try_functions(make_config(keys).algorithm)


def test_the_example_of_the_documentation_passes(tmp_path: Path, make_config: Make) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    assert "def my_loss" in example
    (tmp_path / "my.py").write_text(example)
    keys = {
        LOSS: f"{tmp_path}/my.py:my_loss",
        "algorithm.policy_loss.options": {"cap": 2.0},
        ESTIMATOR: f"{tmp_path}/my.py:my_advantages",
    }
    try_functions(make_config(keys).algorithm)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (-batch.advantages * batch.log_probs).mean()", "a Tensor of shape ()"),
        ("return [0.0]", "returned a list; it must return one loss for each token"),
        ("return batch.log_probs * float('nan')", "returned nan among its losses"),
        ("return -batch.advantages * batch.old_log_probs", "losses without a gradient"),
        ("return 0 * batch.log_probs", "with zero gradient in batch.log_probs"),
        ("return (batch.log_probs - batch.log_probs.detach()).sqrt()", "non-finite gradient"),
        ("return batch.log_probs - batch.log_probs.mean()", "a sequence different losses alone"),
        ("return batch.log_probs - batch.log_probs[0]", "must treat each sequence alone"),
        ("return batch.logprobs", "raised AttributeError: 'LossInputs' object has no attribute"),
        ("return batch.missing", "(my.py:2)"),
    ],
)
def test_each_mistake_of_a_loss_has_its_sentence(
    body: str, said: str, refused: Callable[[str, str], str]
) -> None:
    assert said in refused(LOSS, body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return batch.rewards[:2]", "a ndarray of shape (2,); it must return an array with one"),
        ("return batch.rewards.mean()", "number for each sequence, here 7, or for each token"),
        ("return None", "returned a NoneType"),
        ("return batch.rewards / 0.0", "among its advantages; they must be finite numbers"),
        ("return batch.reward", "(my.py:2)"),
    ],
)
def test_each_mistake_of_an_estimator_has_its_sentence(
    body: str, said: str, refused: Callable[[str, str], str]
) -> None:
    assert said in refused(ESTIMATOR, body)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere.py:mine", "is not an existing file as path.py:function"),
        ("{}:other", "has no 'other'; name one of its functions"),
        ("{}:constant", "constant in {} is not a function"),
    ],
)
def test_a_function_that_is_not_there(
    reference: str, said: str, tmp_path: Path, make_config: Make
) -> None:
    path = tmp_path / "my.py"
    path.write_text("constant = 1\n")
    algorithm = make_config({LOSS: reference.format(path)}).algorithm
    with pytest.raises(ConfigError, match=said.format(path).replace("(", r"\(")):
        try_functions(algorithm)


def test_names_of_ours_are_not_tried(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.launch.preflight.call_isolated", None)
    check_functions(make_config({LOSS: "gspo", ESTIMATOR: "rloo"}).algorithm)


@pytest.mark.parametrize(
    ("source", "limit_s", "said"),
    [
        (RIGHT, 60.0, ""),
        ("def my_loss(batch):\n    return batch.nothing\n", 60.0, "(my.py:2); correct it"),
        ("import os\nos._exit(0)\n", 60.0, "ends the process that calls it (exit code 0)"),
        ("import time\ntime.sleep(600)\n", 0.5, "takes longer than 0.5 s"),
    ],
)
def test_a_trial_is_in_a_process_of_its_own(
    source: str, limit_s: float, said: str, tmp_path: Path, make_config: Make
) -> None:
    path = tmp_path / "my.py"
    path.write_text(source)
    algorithm = make_config({LOSS: f"{path}:my_loss"}).algorithm
    if not said:
        return check_functions(algorithm, limit_s)
    with pytest.raises(ConfigError) as caught:
        check_functions(algorithm, limit_s)
    assert said in str(caught.value)
    assert LOSS in str(caught.value)


def test_a_learner_says_the_digest_of_the_file(
    tmp_path: Path, make_config: Make, make_policy: Callable[..., LoadedPolicy]
) -> None:
    path = tmp_path / "my.py"
    path.write_text(RIGHT)
    config = make_config({LOSS: f"{path}:my_loss"})
    then = Learner(config, make_policy()).collect_facts().functions
    assert then == file_digests({LOSS: f"{path}:my_loss"})
    path.write_text(RIGHT + "# other")
    assert Learner(config, make_policy()).collect_facts().functions != then
    assert Learner(make_config({LOSS: "gspo"}), make_policy()).collect_facts().functions == {}
