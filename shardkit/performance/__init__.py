"""Tools for the speed of loading: `bench` compares, `doctor` explains, `Monitor` watches.

Each imports only those on lines below its own:

    doctor
    bench checks monitor
    contender findings report
    defaults machine runs
"""
