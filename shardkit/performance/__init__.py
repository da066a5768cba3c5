"""Tools for the speed of loading: `bench` compares, `doctor` explains, `Monitor` watches."""
