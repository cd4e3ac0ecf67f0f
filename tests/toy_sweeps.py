"""A plan of tiny runs as plain data, and a trainer that only pretends, for tests of sweeps."""

import json
import sys
from pathlib import Path
from typing import Any

TREE: dict[str, Any] = {
    "name": "toy",
    "preset": "tiny",
    "common": {"train": {"batch_size": 2}},
    "variants": {"dense": {"routing": {"strategy": "none"}}, "mod": {"routing": {"every": 2}}},
    "budgets": [1e9],
    "seeds": [0],
    "sizes": [{"width": 32, "num_layers": 2}, {"width": 64, "num_layers": 4}],
}

# One order for each start of a run, by its folder; after the last, and without one, it finishes.
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
from depthmix.budget import make_schedule
from depthmix.config import load_run_config
from depthmix.config import RunConfig
from depthmix.runs.folder import RunDir

root, args = Path(__file__).parent, sys.argv[1:]
options = {args[i]: args[i + 1] for i in range(len(args)) if args[i].startswith("--")}
path = Path(options.get("--resume") or options["--out"])
name = "/".join(path.parts[-3:])
with open(root / "calls", "a") as calls:
    calls.write(json.dumps([name, args]) + "\\n")
running = root / "running"
(running / str(os.getpid())).touch()
with open(root / "crowds", "a") as crowds:
    crowds.write(f"{len(list(running.iterdir()))}\\n")
started = sum(json.loads(line)[0] == name for line in open(root / "calls"))
orders = json.loads((root / "orders.json").read_text()).get(name, [])
order = orders[started - 1] if started <= len(orders) else "finish"
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
try:
    if order == "refuse":
        print("first words\\n\\ndepthmix: no room on the disk")
        sys.exit(2)
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if "--resume" in options:
        run = RunDir.open(path)
        config = RunConfig.from_dict(run.read_config())
    else:
        config = load_run_config(Path(options["--config"]))
        data = {"hash": options.get("--data", "default")}
        start = {"time": "2026-11-15T12:00:00+00:00", "data": data}
        run = RunDir.create(path, config.to_toml(), start)
    steps = make_schedule(config).num_steps
    status = {"num_steps": steps, "loss": 1.0}
    run.append_metrics({"step": 1, "kind": "train", "flops": 1000})
    (path / "leads").write_text(str(os.getsid(0) == os.getpid()))
    if order == "break":
        print("ValueError: broken")
        sys.exit(1)
    if order in ("wait", "ignore"):
        (root / "waiting").touch()
        # not for ever: a broken sweep must not leave it behind
        end = time.monotonic() + 60
        while time.monotonic() < end and not (received and order == "wait"):
            time.sleep(0.01)
    if received:
        # as long as saving takes: a second signal in this time would stop it
        time.sleep(0.2)
        (path / "received").write_text(json.dumps(received))
        run.write_status("interrupted", step=1, **status)
        sys.exit(130)
    # long enough for others to start beside it
    time.sleep(0.2)
    run.write_status("finished", step=steps, **status)
finally:
    (running / str(os.getpid())).unlink()
"""


class Fake:
    """The pretending trainer: what it shall do, and what it was told."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        (root / "running").mkdir()
        (root / "train.py").write_text(TRAINER)
        self.command = (sys.executable, str(root / "train.py"))
        self.order({})

    def order(self, orders: dict[str, list[str]]) -> None:
        (self.root / "orders.json").write_text(json.dumps(orders))

    def read_calls(self) -> list[tuple[str, list[str]]]:
        path = self.root / "calls"
        return [(n, a) for n, a in map(json.loads, path.read_text().splitlines())]

    def count_most_at_once(self) -> int:
        return max(map(int, (self.root / "crowds").read_text().split()))
