"""laminar: the command line. Entry point only, which defers slow imports."""

from __future__ import annotations

import sys

from laminar.names import exit_codes


def main() -> None:
    """Run the `laminar` command; Ctrl-C during its imports has no traceback either."""
    try:
        from laminar.cli.commands import run_command

        code = run_command()
    except KeyboardInterrupt:
        print("laminar: interrupted", file=sys.stderr)
        code = exit_codes.STOPPED_EARLY
    sys.exit(code)


if __name__ == "__main__":
    main()
