"""Replicas in a local Ray. It is not installed for the tests: where it is, they run."""

import importlib
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from depthmix.infer import SamplingParams
from depthmix.serve.limits import Limits
from served_models import END, HeldEngine, make_served, write_served_run

PORT = 18437


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "depthmix.serve.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"need Ray: pip install 'depthmix\[ray\]'"):
        importlib.import_module("depthmix.serve.ray")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'depthmix[ray]'")
    from ray import serve  # pyrefly: ignore[missing-import]

    from depthmix.serve.ray import ReplicaOptions, app

    path = write_served_run(tmp_path_factory.mktemp("served"))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": PORT})
        options = {"path": str(path), "replicas": "2", "name": "tiny", "batch": "4"}
        serve.run(app(ReplicaOptions(**options, limits=Limits(max_n=3))))
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def count_tokens(client: httpx.Client, num_tries: int = 40) -> dict[str, float]:
    """Each replica's metrics, distinguished by what they count; any of them may answer."""
    found: dict[str, float] = {}
    for _ in range(num_tries):
        lines = client.get("/metrics").text.splitlines()
        created = next(line for line in lines if line.startswith("depthmix_flops_created"))
        (tokens,) = [x.split()[1] for x in lines if x.startswith("depthmix_generated_tokens_t")]
        found[created] = float(tokens)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_replicas_answer_as_one_server(client: httpx.Client) -> None:
    prompt = make_served().vocabulary.encode("once upon")
    params = SamplingParams(max_tokens=8, seed=3, stop_tokens=[END])
    (truth,) = HeldEngine().generate([prompt], params)[0].samples
    wish = {"prompt": "once upon", "max_tokens": 8, "seed": 3}
    for _ in range(20):
        answer = client.post("/v1/completions", json=wish)
        assert answer.json()["choices"][0]["text"] == truth.text
    with client.stream("POST", "/v1/completions", json={**wish, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    counted = count_tokens(client)
    assert len(counted) == 2
    assert all(counted.values())
    # limits, errors and names are the server's own
    refused = client.post("/v1/completions", json={**wish, "n": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    wrong = client.get("/v1/models", headers={"Host": "elsewhere.example"})
    assert wrong.status_code == 403


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_who_leaves_a_replica_frees_its_rows(client: httpx.Client) -> None:
    wish = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=wish) as stream:
        next(stream.iter_lines())
    last = sum(count_tokens(client).values())
    for _ in range(100):
        time.sleep(0.1)
        now = sum(count_tokens(client).values())
        if now == last:
            break
        last = now
    shown = [client.get("/health").json() for _ in range(20)]
    assert all((each["running"], each["waiting"]) == (0, 0) for each in shown)
