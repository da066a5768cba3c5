"""The program `shardkit`, also as `python -m shardkit`."""

import sys


def main() -> None:
    """Run the command line. Also handles Ctrl-C while its libraries are being imported."""
    try:
        from shardkit.cli import main as run
    except KeyboardInterrupt:
        print("\nshardkit: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # too few open files are allowed, or the disk fails
        print(f"shardkit: its modules cannot be loaded: {error}", file=sys.stderr)
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
