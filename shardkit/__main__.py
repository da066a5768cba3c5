"""`python -m shardkit`."""

from shardkit.cli import main

main()
