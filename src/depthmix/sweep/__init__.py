"""Sweeps: many runs from one plan, their folders, and the processes that train them.

    plan      a TOML file → runs, checked
    folders   the state of runs, read from their folders
    execute   runs as processes on this machine, or as jobs on SLURM
    launch    a plan and a folder: shown, trained or submitted

Does not import torch: each run is an ordinary `depthmix train` in its own process.
"""
