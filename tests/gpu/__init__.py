"""What needs a GPU, and is in no other run: `tests/gpu/run.sh`."""
