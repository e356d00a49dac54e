import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_sweeps import small_trace

from hisparsim.cli.app import run
from hisparsim.sweep.goodput import MAX_DOUBLINGS, Bisection, interval
from hisparsim_traces import closed_loop, conversations
from hisparsim_traces.formats.own_parquet import write

BUSY = ["--set", "scheduler.max_num_seqs=4", "--jobs", "1"]


def search(bisection: Bisection, capacity: float) -> list[float]:
    """The loads tried until it is done, where every load up to `capacity` holds."""
    tried = []
    while bisection.next is not None:
        tried.append(bisection.next)
        bisection.tell(bisection.next <= capacity)
    return tried


@given(st.floats(0.01, 100), st.floats(0.001, 3))
def test_a_bisection_ends_within_its_tolerance_below_the_capacity(start: float, factor: float) -> None:
    capacity = start * 10**factor / 10
    bisection = Bisection(start, whole=False, limit=start * 2**MAX_DOUBLINGS)
    tried = search(bisection, capacity)
    assert len(tried) <= 2 + MAX_DOUBLINGS + 8
    assert bisection.result <= capacity * (1 + 1e-6)
    assert bisection.result * 1.05 >= capacity * (1 - 1e-4) or bisection.breaks is None


@given(st.integers(0, 300), st.integers(1, 256), st.integers(1, 64))
def test_a_bisection_over_users_is_what_counting_up_gives_to_one_in_twenty(
    capacity: int, limit: int, start: int
) -> None:
    bisection = Bisection(min(start, limit), whole=True, limit=limit)
    tried = search(bisection, capacity)
    counted = max((users for users in range(1, limit + 1) if users <= capacity), default=0)
    assert counted / 1.05 - 1e-9 <= bisection.result <= counted
    assert all(load == int(load) and 1 <= load <= limit for load in tried)
    assert len(tried) == len(set(tried))


def test_a_load_that_nothing_sustains_is_found_in_two_tries() -> None:
    bisection = Bisection(4.0, whole=False, limit=100.0)
    assert len(search(bisection, 0.0)) == 2
    assert bisection.result == 0.0


def test_the_interval_is_students_and_half_a_gap_wider() -> None:
    # t(0.975, 2) = 4.303 and s = 1 for 1, 2, 3
    low, high = interval([1.0, 2.0, 3.0], 0.2) or (0.0, 0.0)
    assert high == pytest.approx(2 + 4.303 / math.sqrt(3) + 0.1)
    assert low == 0.0
    assert interval([2.0], 0.2) is None
    assert interval([2.0, 2.0], 0.2) == pytest.approx((1.9, 2.1))


@pytest.fixture(scope="module")
def busy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("goodput") / "busy.parquet"
    write(small_trace(40, rate_per_s=1.0), path)
    return path


def goodput(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert run(["goodput", *arguments, *BUSY, "--json"]) == 0
    policies: list[dict[str, object]] = json.loads(capsys.readouterr().out)["policies"]
    return policies


def test_each_policy_has_its_rate_with_an_interval_and_what_binds(
    busy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(busy_file), "--slo", "ttft_s.p99=1", "--policy", "gpu-only", "--policy", "hybrid"]
    found = goodput(capsys, *arguments, "--seed", "1", "--seed", "2")
    assert [row["policy"] for row in found] == ["gpu-only", "hybrid"]
    for row in found:
        rate, low_high = row["rate_per_s"], row["ci95"]
        assert isinstance(rate, float) and isinstance(low_high, list)
        assert 0 <= low_high[0] <= rate <= low_high[1] and rate > 0
        assert row["violates"] == "ttft_s.p99 <= 1"
        assert isinstance(row["bound_by"], str)
        # The load holds, and a twentieth more does not, for the seed that sustains least.
        least = min(row["by_seed"])  # type: ignore[call-overload]
        seed = [1, 2][row["by_seed"].index(least)]  # type: ignore[attr-defined]
        for rate_per_s, holds in ((least, True), (least * 1.06, False)):
            flags = [f"workload.rate_per_s={rate_per_s}", f"seed={seed}", f"policy.name={row['policy']}"]
            assert (p99(busy_file, flags) <= 1) is holds


def p99(trace: Path, overrides: list[str]) -> float:
    import hisparsim
    from hisparsim.results.metrics import compute_metrics

    scenario = hisparsim.Scenario.load(None, ["scheduler.max_num_seqs=4", *overrides])
    found = compute_metrics(hisparsim.simulate(scenario, hisparsim.load_trace(trace))).ttft_s.p99
    assert found is not None
    return found


def test_a_stricter_objective_is_sustained_at_a_lower_rate(
    busy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    for limit in ("3", "0.5"):
        arguments = [
            str(busy_file),
            "--slo",
            f"ttft_s.p99={limit}",
            "--policy",
            "gpu-only",
            "--load",
            "trace",
        ]
        (row,) = goodput(capsys, *arguments)
        assert row["ci95"] is None
        rates.append(row["rate_per_s"])
    assert rates[0] > rates[1] > 0  # type: ignore[operator]


def test_users_of_a_closed_loop_are_found_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.parquet"
    write(conversations(12, 2, 3000, 200, 20), path)
    arguments = [str(path), "--load", "concurrency", "--slo", "ttft_s.p50=0.3", "--policy", "gpu-only"]
    (row,) = goodput(capsys, *arguments)
    assert 1 <= row["concurrency"] <= 4  # type: ignore[operator]


def test_an_objective_that_nothing_meets_gives_zero_and_says_which(
    busy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = goodput(
        capsys, str(busy_file), "--slo", "tpot_s.p50=0.000001", "--policy", "gpu-only", "--seed", "1"
    )
    assert row["rate_per_s"] == 0
    assert row["violates"] == "tpot_s.p50 <= 1e-06"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo", "ttft.p99=1"], "unknown metric 'ttft.p99'"),
        (["--slo", "ttft_s.p99=1", "--policy", "hybrit"], "did you mean 'hybrid'"),
        (["--slo", "ttft_s.p99=1", "--load", "noise"], "known are rate, trace, concurrency"),
        (["--slo", "ttft_s.p99=1", "--load", "trace"], "has no arrival times to stretch"),
    ],
)
def test_a_wrong_question_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "still.parquet"
    write(closed_loop(4, 100, 5), path)
    assert run(["goodput", str(path), *flags, "--jobs", "1"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
