"""The program `shardkit`, also as `python -m shardkit`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while its libraries are imported ends it as later."""
    try:
        from shardkit.cli import main as run
    except KeyboardInterrupt:
        print("\nshardkit: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
