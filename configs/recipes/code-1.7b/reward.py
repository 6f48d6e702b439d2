"""The reward: 1 if the program in the response passes all unit tests of its row, else 0.

Program and tests run in a sandbox (Linux x86-64, user namespaces), with limits of time and memory.
"""

import re
import secrets

from laminar.tasks.sandbox.sandbox import Sandbox

SANDBOX = Sandbox(seconds=5.0, memory_mb=512)  # a machine without one is refused before the run
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return the score, and the share of the tests that pass as a metric."""
    blocks = BLOCK.findall(solution_str)
    program = blocks[-1] if blocks else solution_str
    tests = extra_info["tests"]
    with SANDBOX.session() as session:  # at the time limit it ends, and later tests fail at once
        session.run(f"{extra_info['setup']}\n{program}")
        passed = sum(run_test(session, test) for test in tests)
    return {"score": float(passed == len(tests)), "tests_passed": passed / len(tests)}


def run_test(session, test):
    """Return whether the test ends; the word that shows it is unknown to the program."""
    word = secrets.token_hex(8)
    return word in session.run(f"{test}\nprint({word!r})").output
