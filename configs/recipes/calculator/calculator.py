"""The environment of run.toml: one tool, which adds two whole numbers."""


class Calculator:
    """A calculator; sums are scored by their answers, so it has no reward of its own."""

    def reset(self, **row: object) -> None:
        """Start a new conversation; a calculator remembers nothing."""

    def add(self, a: int, b: int) -> int:
        """Add two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b
