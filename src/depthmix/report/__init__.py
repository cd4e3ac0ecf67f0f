"""Pages and tables for people, from files alone: models, runs, and traces of texts.

`load` reads runs, `fit` finds minima, `charts` decides what is shown, `figures` draws it, and
`page` writes the page. `curves` draws losses alone, also in a terminal. `traces` and `view` show a
text's path through a model, `describe` models before they are trained. Does not load torch.
"""

from depthmix.report.fit import compare_minima, fit_runs
from depthmix.report.load import load_runs
from depthmix.report.page import write_report

__all__ = ["compare_minima", "fit_runs", "load_runs", "write_report"]
