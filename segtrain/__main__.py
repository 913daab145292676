"""The program's start: an interrupt counts from the first line on, before anything that takes a while is imported."""

import signal
import sys


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from segtrain.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("segtrain: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
