"""Tools for the speed of loading: `bench` compares, `doctor` explains, `Monitor` watches.

Each imports only those on lines below its own:

    bench
    contender doctor
    checks monitor on_gpu
    findings report
    defaults machine runs
"""
