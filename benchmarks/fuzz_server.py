"""schemathesis against `depthmix serve`: what its OpenAPI schema allows, and what it does not.

It makes up requests from the schema, good and bad ones, and looks at each answer: none may be a
5xx, and all must have the status, the type and the shape that the schema gives. It is not one of
the project's tools: install it anywhere (`pip install schemathesis`) and name its command.

    python benchmarks/fuzz_server.py runs/first
    python benchmarks/fuzz_server.py runs/first --st elsewhere/bin/st --examples 500 --seed 7
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from served import serve

# What is left out: the schema cannot say that null is the same as nothing, which parameters go
# together, and which ids a vocabulary has.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
    *("unsupported_method", "allow_header_conformance"),
)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="what is served, as in 'depthmix serve'")
    parser.add_argument("--st", default="st", help="the command of schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="requests made up for each route")
    parser.add_argument("--workers", type=int, default=4, help="clients at a time")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    with serve(arguments.model) as (address, _), tempfile.TemporaryDirectory() as folder:
        command = [arguments.st, "run", f"{address}/openapi.json"]
        command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"]
        command += ["-n", f"{arguments.examples}", "--workers", f"{arguments.workers}"]
        command += ["--seed", f"{arguments.seed}", "--request-timeout", "120"]
        # it keeps its own notes in the working folder
        st = Path(arguments.st)
        command[0] = str(st.resolve()) if st.exists() else arguments.st
        return subprocess.run([*command, "--continue-on-failure"], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
