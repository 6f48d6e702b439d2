"""Environments in which the model writes Python, which runs in a sandbox (docs/agents.md).

Python     each call has its own sandbox and can be repeated: env.call_semantics = "retryable"
Notebook   one sandbox for all calls of a response, which find each other's names: "at-most-once"
"""

from laminar.tasks.sandbox.sandbox import Sandbox

sandbox = Sandbox(seconds=5.0)  # made here, so that a machine without one is refused before a run


class Python:
    def reset(self, **row: object) -> None:
        """Start a new conversation without memory of others."""

    def python(self, code: str) -> str:
        """Run a Python program with the standard library, and return what it prints.

        Args:
            code: The program; the value of an expression in its last line is printed.
        """
        return sandbox.run(code).text


class Notebook:
    def reset(self, **row: object) -> None:
        """Start a new conversation with a separate process."""
        self._session = sandbox.session()

    def python(self, code: str) -> str:
        """Run a cell of a Python notebook, which keeps its names, and return what it prints.

        Args:
            code: The cell; the value of an expression in its last line is printed.
        """
        return self._session.run(code).text
