"""Many runs from one file: a plan, what its folders say, and the processes that carry it out.

Knows no torch: a run is an ordinary `depthmix train` in a process of its own.
"""
