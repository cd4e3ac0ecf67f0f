"""`depthmix presets`: list the presets. Does not load torch."""

from depthmix.cli.arguments import app


@app.command()
def presets() -> None:
    """List the presets, with parameters and FLOPs."""
    from depthmix.report.describe import list_presets

    print(*list_presets(), sep="\n")
