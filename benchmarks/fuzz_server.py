"""schemathesis against `depthmix serve`: what its OpenAPI schema allows, and what it does not.

It makes up requests from the schema, good and bad ones, and looks at each answer: none may be a
5xx, and all must have the status, the type and the shape that the schema tells. It is not one of
the project's tools: install it anywhere (`pip install schemathesis`) and name its command.

    python benchmarks/fuzz_server.py runs/first
    python benchmarks/fuzz_server.py runs/first --st elsewhere/bin/st --examples 500 --seed 7
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# What is left out: the schema cannot tell that null is the same as nothing, which parameters go
# together, and which ids a vocabulary has.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
    *("unsupported_method", "allow_header_conformance"),
)
READY_SECONDS = 300


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", help="what is served, as in 'depthmix serve'")
    parser.add_argument("--st", default="st", help="the command of schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="requests made up for each route")
    parser.add_argument("--workers", type=int, default=4, help="clients at a time")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def start_server(models: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server that takes requests, and its address."""
    command = [sys.executable, "-m", "depthmix", "serve", *models, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # a server that does not start is no reason to wait for ever
    timer = threading.Timer(READY_SECONDS, process.kill)
    timer.start()
    address = None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        found = re.search(r"at (http://\S+)/v1", line)
        address = address if found is None else found[1]
        if line.strip() == "depthmix: ready":
            break
    timer.cancel()
    if address is None or process.poll() is not None:
        raise SystemExit("the server did not start")
    # what it logs from now on must not fill a pipe that nobody reads
    threading.Thread(target=sys.stderr.writelines, args=(process.stderr,), daemon=True).start()
    return process, address


def main() -> int:
    arguments = read_arguments()
    process, address = start_server(arguments.model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [arguments.st, "run", f"{address}/openapi.json"]
            command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"]
            command += ["-n", f"{arguments.examples}", "--workers", f"{arguments.workers}"]
            command += ["--seed", f"{arguments.seed}", "--request-timeout", "120"]
            # it keeps its own notes in the working folder
            st = Path(arguments.st)
            command[0] = str(st.resolve()) if st.exists() else arguments.st
            code = subprocess.run([*command, "--continue-on-failure"], cwd=folder).returncode
        is_alive = process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(60)
    state = "up" if is_alive else "down"
    print(f"schemathesis exited with {code}; the server was {state} then, and exited with {ended}")
    return code or ended or int(not is_alive)


if __name__ == "__main__":
    sys.exit(main())
