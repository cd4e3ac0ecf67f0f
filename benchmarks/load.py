"""Many clients of whom half leave in the middle: the server must lose nothing.

    python benchmarks/load.py runs/first
    python benchmarks/load.py runs/first --requests 1000 --clients 16 --json out.json

Sends requests of random kinds over `--clients` connections: streams and whole answers, completions
from token ids with echo, log-probabilities, paths or several samples. Every second client closes
its connection at a random time in every other request, before the first token or after some. Fails
if an answer is not 200, if samples, pages of the cache or connections remain at the end, or if the
server's memory in the last third is more than 5 % above that in the middle third. Needs Linux, and
httpx.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from served import serve

GROWTH = 1.05
NUM_READINGS = 60


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--most-tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Load:
    """Clients that share a number of requests."""

    def __init__(self, address: str, process_id: int, card: dict[str, Any], args: Any) -> None:
        self.address, self.process_id, self.args = address, process_id, args
        self.longest = card["max_model_len"]
        self.num_begun = self.num_left = self.num_done = self.num_busy = 0
        self.wrong: list[str] = []
        self.memory: list[int] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._play(number) for number in range(self.args.clients)))

    async def _play(self, number: int) -> None:
        rng = random.Random(self.args.seed * 1000 + number)
        options: dict[str, Any] = {"base_url": self.address, "timeout": 600}
        async with httpx.AsyncClient(**options) as client:
            while self.num_begun < self.args.requests and not self.wrong:
                if self.num_begun % max(1, self.args.requests // NUM_READINGS) == 0:
                    self.memory.append(read_memory(self.process_id))
                self.num_begun += 1
                # of this client's requests every other one is left
                leaves = number % 2 == 1 and rng.random() < 0.5
                await self._ask(client, self._make_wish(rng), rng, leaves)

    def _make_wish(self, rng: random.Random) -> dict[str, Any]:
        most = self.args.most_tokens
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, self.longest - most))]
        wish: dict[str, Any] = {"prompt": prompt[: rng.choice((8, 32, 128))], "ignore_eos": True}
        wish |= {"max_tokens": rng.randint(1, most), "stream": rng.random() < 0.5}
        wish |= {
            "depth": rng.random() < 0.2,
            "echo": rng.random() < 0.1,
            "n": rng.choice((1, 1, 2)),
        }
        if rng.random() < 0.2:
            wish["logprobs"] = rng.randint(0, 5)
        return wish

    async def _ask(
        self, client: httpx.AsyncClient, wish: dict[str, Any], rng: random.Random, leaves: bool
    ) -> None:
        try:
            async with asyncio.timeout(rng.expovariate(4) if leaves else None):
                async with client.stream("POST", "/v1/completions", json=wish) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
        except TimeoutError:
            # leaving the block closes the connection
            self.num_left += 1
            return
        if answer.status_code == 429:
            self.num_busy += 1
        elif answer.status_code != 200 or (wish["stream"] and lines[-1] != "data: [DONE]"):
            self.wrong.append(f"{answer.status_code} {lines[-1][:200]}")
        else:
            self.num_done += 1


def read_memory(process_id: int) -> int:
    """Bytes that a process has in memory."""
    text = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


def count_sockets(process_id: int) -> int:
    folder = Path(f"/proc/{process_id}/fd")
    return sum(str(link.readlink()).startswith("socket") for link in folder.iterdir())


def read_gauges(address: str) -> dict[str, float]:
    text = httpx.get(f"{address}/metrics").text
    names = ("cache_pages_used", "samples_running", "samples_waiting")
    return {
        name: sum(map(float, re.findall(rf"^depthmix_{name}{{.*?}} (\S+)$", text, re.MULTILINE)))
        for name in names
    }


def main() -> int:
    args = read_arguments()
    with serve([args.run], "--max-queue", 4 * args.clients) as (address, process):
        num_sockets = [count_sockets(process.pid)]
        card = httpx.get(f"{address}/v1/models").json()["data"][0]
        load = Load(address, process.pid, card, args)
        start = time.perf_counter()
        asyncio.run(load.run())
        seconds = time.perf_counter() - start
        # whoever left last is noticed before the next step
        time.sleep(1)
        num_sockets.append(count_sockets(process.pid))
        gauges = read_gauges(address)
        health = httpx.get(f"{address}/health").json()["status"]
    third = len(load.memory) // 3
    middle, last = (statistics.median(load.memory[cut : cut + third]) for cut in (third, 2 * third))
    result = {
        "model": str(args.run),
        "requests": load.num_begun,
        "connections": args.clients,
        "answered": load.num_done,
        "left_in_the_middle": load.num_left,
        "told_to_wait": load.num_busy,
        "wrong": load.wrong,
        "health": health,
        "at_the_end": gauges,
        "sockets_before_and_after": num_sockets,
        "mebibytes": {
            "begin": load.memory[0] >> 20,
            "middle_third": int(middle) >> 20,
            "last_third": int(last) >> 20,
        },
        "seconds": round(seconds, 1),
    }
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    leaks = any(gauges.values()) or last > GROWTH * middle or num_sockets[1] > num_sockets[0]
    return int(bool(load.wrong) or leaks or health != "ok")


if __name__ == "__main__":
    sys.exit(main())
