"""The program `shardkit`, also as `python -m shardkit`."""

import sys


def main() -> None:
    """Run the command line. Also handles Ctrl-C while its libraries are being imported."""
    try:
        from shardkit.cli import main as run
    except KeyboardInterrupt:
        print("\nshardkit: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
