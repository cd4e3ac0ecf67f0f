"""The measurement behind the server: its client, and what it writes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import serving

from depthmix.report.figures import save_image
from served_models import run_server


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_reads_answers_to_their_end(stream: bool) -> None:
    with run_server() as running:
        client = serving.Client(f"http://127.0.0.1:{running.port}", 9)
        answer = asyncio.run(client.ask([5, 6], 3, stream=stream))
        assert 0 < answer.share_of_blocks < 1
        # a stream's first token comes before its end
        assert (answer.first_seconds < answer.seconds) == stream
        found = asyncio.run(client.saturate([[5], [6]], stream=stream))
        assert found["tokens_per_second"] > 0

        def fail(step: int) -> None:
            raise RuntimeError("no")

        running.engine.fail = fail
        with pytest.raises(AssertionError):
            asyncio.run(client.ask([5, 6], 3, stream=stream))


def test_results_become_tables_and_a_figure(tmp_path: Path) -> None:
    times = dict.fromkeys((f"{p}_seconds" for p in ("mean", "p50", "p99")), 0.25)
    point = {"requests": 3, **times}
    point |= {f"first_{key}": 0.05 for key in times} | {f"token_{key}": 0.002 for key in times}
    curve = [{"rate": 10 * fraction, **point} for fraction in serving.FRACTIONS]
    turn = {"seconds": 2.1, "tokens_per_second": 1234.0, "share_of_blocks": 0.5625}
    model = {"engine": {"seconds": 2.0, "tokens_per_second": 1300.0}, "curve": curve}
    model |= {"saturated": turn, "streamed": turn}
    result: dict[str, Any] = {"device": "a GPU", "torch": "2", "shape": "large", "requests": 1024}
    result |= {"prompt_tokens": (64, 1024), "new_tokens": 128, "throughput_over_dense": 1.5}
    result |= {"knee_requests_per_second": 7.0, "latency_saved_at_knee": 0.3}
    result["models"] = {"dense": model, "mod": model}
    text = serving.write_tables(result)
    assert "| mod | 1,300 | 1,234 | 1,234 | +5.0 % | +5.0 % | 56.2 % |" in text
    assert "| 1.00 | dense | 250.0 | 250.0 | 50.0 | 50.0 | 2.0 | 2.0 |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 + 2 + 2 * len(serving.FRACTIONS)
    # every row has as many fields as its head
    assert {line.count("|") for line in lines} == {8, 9}
    save_image(serving.chart_curves(result), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
