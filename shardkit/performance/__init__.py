"""Tools for the speed of loading: `bench` compares, `doctor` explains, `Monitor` watches.

Each imports only those on lines below its own:

    doctor
    bench image_checks
    checks monitor peers
    contender findings report
    defaults machine peer_loops runs
"""
