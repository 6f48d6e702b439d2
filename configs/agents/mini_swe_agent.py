"""mini-swe-agent on a repository of one file: pip install mini-swe-agent.

Its commands run in a sandbox, which has Python and no shell: the agent is told to write programs.
The score is whether the repository's test passes in the end.
"""

import os
from typing import Any

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_model import LitellmModel

from laminar.tasks.sandbox.sandbox import Sandbox

STEPS_MAX = 8
DONE = "SUBMIT"
SYSTEM = "You repair programs. Each command of the tool bash is a Python program, run in /work."
TASK = "{{task}} Read and edit the files, try them, then print " + DONE + " alone."
FILES = {"sums.py": "def add(a, b):\n    return a - b\n"}
WRITE = f"for name, text in {FILES!r}.items(): open('/work/' + name, 'w').write(text)"
TEST = """
names = {}
exec(open('/work/sums.py').read(), names)
all(names['add'](a, b) == a + b for a in range(3) for b in range(3))
"""
sandbox = Sandbox(seconds=5.0)  # made here, so that a machine without one is refused before a run


class Repository:
    """An environment of mini-swe-agent: the files in a sandbox."""

    def __init__(self) -> None:
        self.session = sandbox.session()
        self.session.run(WRITE)

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command and return its output; the agent ends with DONE."""
        text = self.session.run(action["command"]).text
        if text.strip() == DONE:
            ended = {"exit_status": "Submitted", "submission": ""}
            raise Submitted({"role": "exit", "content": "", "extra": ended})
        return {"output": text, "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **values: Any) -> dict[str, Any]:
        """Return the values for the agent's prompts."""
        return values

    def serialize(self) -> dict[str, Any]:
        """Return what the agent's log keeps of the environment."""
        return {}


def solve(task: dict[str, Any], endpoint: Any) -> float:
    """Return whether the test of the repository passes after the agent's work."""
    model = LitellmModel(
        model_name=f"openai/{endpoint.model}",
        model_kwargs={"api_base": endpoint.base_url, "api_key": endpoint.api_key},
        cost_tracking="ignore_errors",
    )
    repository = Repository()
    agent = DefaultAgent(
        model, repository, system_template=SYSTEM, instance_template=TASK, step_limit=STEPS_MAX
    )
    agent.run(task["prompt"])
    return float(repository.session.run(TEST).text.strip() == "True")
