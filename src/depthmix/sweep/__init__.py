"""Sweeps: many runs from one plan, their folders, and the processes that train them.

Does not import torch: each run is an ordinary `depthmix train` in its own process.
"""
