"""Pages and tables for people, from files alone: models, runs, and traces of texts.

`load` reads runs, `fit` finds minima, `charts` says what is shown, `figures` draws it, and `page`
writes it down. `curves` draws losses alone, in a terminal too. `traces` and `view` are about one
text and its path through a model, `describe` about models before they are trained. Nothing here
loads torch.
"""

from depthmix.report.fit import compare_minima, fit_runs
from depthmix.report.load import load_runs
from depthmix.report.page import write_report

__all__ = ["compare_minima", "fit_runs", "load_runs", "write_report"]
