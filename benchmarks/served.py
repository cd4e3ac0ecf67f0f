"""A server as a process of its own, for the scripts here that send it requests."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 600
END_SECONDS = 60


@contextmanager
def serve(
    models: Sequence[str | Path], *options: object
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, once it takes requests, and its process; it must be up at the end, and exit 0.

    `options` are those of `depthmix serve`.
    """
    words = [*models, "--port", "0", *options]
    command = [sys.executable, "-m", "depthmix", "serve", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _wait_ready(process), process
        if process.poll() is not None:
            raise SystemExit(f"the server ended by itself, with exit code {process.returncode}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code:
        raise SystemExit(f"the server exited with {code} after SIGTERM")


def _wait_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    # do not wait forever for a server that does not start
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
    # what it logs from now on must not fill a pipe without a reader
    threading.Thread(target=sys.stderr.writelines, args=(process.stderr,), daemon=True).start()
    return address
