"""What a user can get wrong ends with one clear line on stderr, exit code 2, and nothing on disk."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from pathlib import Path

import pytest

from hisparsim.cli.app import USER_ERROR, run

ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def lines(*rows: object) -> bytes:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows).encode()


def row(**changes: object) -> dict[str, object]:
    return {**ROW, **changes}


def replay(*arguments: str) -> int:
    return run(["replay", *arguments, "--jobs", "1", "--out", "out"])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only thing printed: one line of stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def nothing_written(folder: Path, *known: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(known)


FILES = {
    "empty.jsonl": (b"", ("empty.jsonl",)),
    "blank.jsonl": (b"\n\n", ("blank.jsonl",)),
    "binary.jsonl": (bytes(range(256)) * 40, ("binary.jsonl",)),
    "cut.jsonl": (lines(row(), row(timestamp=10), '{"timestamp": 20, "input_len'), ("cut.jsonl:3",)),
    "negative.jsonl": (lines(*[row()] * 99, row(input_length=-5)), ("negative.jsonl:100", "-5")),
    "nan.jsonl": (
        lines(row(), '{"timestamp": 1, "input_length": NaN, "output_length": 5, "hash_ids": [1]}\n'),
        ("nan.jsonl:2", "NaN"),
    ),
    "nan.csv": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n"
        b"2023-11-16 18:15:50.9951690,nan,5\n",
        ("nan.csv:3",),
    ),
    "negative.csv": (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,-5\n",
        ("negative.csv", "negative GeneratedTokens"),
    ),
    "cut.jsonl.gz": (
        gzip.compress(lines(*[row(timestamp=i) for i in range(2000)]))[:-300],
        ("cut.jsonl.gz",),
    ),
    "prose.txt": (b"this is no trace\nat all\n", ("prose.txt",)),
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_that_is_no_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert replay(name) == USER_ERROR
    line = one_line(capsys)
    assert all(word in line for word in words), line
    nothing_written(tmp_path, name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.jsonl",), ("missing.jsonl",)),
        (("opnhands",), ("opnhands", "openhands")),
        ((".",), (".",)),
        (("openhands", "--policy", "hybird"), ("hybird", "hybrid", "gpu-only")),
        (("openhands", "--policy", "hybrid", "--policy", "hybrid"), ("twice",)),
        (("openhands", "--policy", "mine.py:Mine"), ("mine.py", "does not exist")),
        (("openhands", "--set", "model.preset=glm-6"), ("glm-6", "glm-5.3")),
        (("openhands", "--set", "node.preset=h300x8"), ("h300x8", "h200x8")),
        (("openhands", "--set", "locality.profile=none-such"), ("none-such", "glm-5.1")),
        (("openhands", "--set", "kv.hot_row=4096"), ("kv.hot_row", "kv.hot_rows")),
        (("openhands", "--set", "kv.hot_rows"), ("section.key=value",)),
        (("openhands", "--set", "kv.hot_rows=1024"), ("1024", "2048", "32768")),
        (("openhands", "--set", "kv.hot_rows=40000"), ("40000", "32768")),
        (("openhands", "--set", "kv.hot_rows=many"), ("kv.hot_rows", "many")),
        (("openhands", "--set", "policy.no_such_switch=1", "--policy", "hybrid"), ("no_such_switch",)),
        (("openhands", "--set", "policy.lease_next_step=7", "--policy", "hybrid"), ("lease_next_step",)),
        (("openhands", "--set", "node.preset=h100x1", "--set", "parallel.tp=1"), ("weights", "h100x1")),
        (("openhands", "--set", "kv.host_pool_gib=0.001"), ("host pool", "kv.host_pool_gib")),
        (("openhands", "--set", "kv.gpu_kv_gib=0.001"), ("GPU pool",)),
        (("openhands", "--set", "workload.time_scale=0"), ("workload.time_scale",)),
        (("openhands", "--set", "workload.time_scale=nan"), ("workload.time_scale",)),
        (("openhands", "--set", "parallel.tp=16"), ("16", "8")),
        (("openhands", "--scenario", "missing.toml"), ("missing.toml", "does not exist")),
        (("openhands", "--limit", "0"), ("--limit",)),
        (("openhands", "--set", "cost.calibration=c.json"), ("cost.source=calibration:c.json",)),
        (("openhands", "--set", "cost.resolve_us=1e18"), ("cost.resolve_us", "1e18")),
        (("openhands", "--set", "links.gather_gb_per_s=1e-12"), ("links.gather_gb_per_s", "0.001")),
        (("openhands", "--set", "kv.gpu_kv_gib=1e12"), ("kv.gpu_kv_gib", "140.4 GiB")),
        (("openhands", "--set", "kv.prefix_offload_gib=1e-9", "--policy", "prefix-offload"), ("no page",)),
    ],
)  # fmt: skip
def test_a_wrong_argument(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(*arguments) == USER_ERROR
    line = one_line(capsys)
    assert all(word in line for word in words), line
    nothing_written(tmp_path)


def test_an_output_directory_that_exists_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("kept")
    assert replay("openhands") == USER_ERROR
    assert "out: exists already" in one_line(capsys)
    assert (tmp_path / "out/mine.txt").read_text() == "kept"
    nothing_written(tmp_path, "out")


@pytest.mark.parametrize(
    ("rule", "finished", "rejected", "skipped"),
    [("reject", 2, 1, 0), ("skip", 2, 0, 1), ("truncate", 3, 0, 0)],
)
def test_a_prompt_longer_than_the_window_is_rejected_skipped_or_truncated_and_counted(
    rule: str, finished: int, rejected: int, skipped: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (row(), row(input_length=5_000, hash_ids=list(range(1, 11))), row(timestamp=5))
    (tmp_path / "long.jsonl").write_bytes(lines(*rows))
    window = ("--set", "scheduler.max_model_len=2000", "--set", f"workload.over_length={rule}")
    assert replay("long.jsonl", "--policy", "gpu-only", "--json", *window) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["num_finished"] == finished
    described = json.loads((tmp_path / "out/gpu-only/run.json").read_text())
    import pyarrow.parquet as pq

    status = pq.ParquetFile(tmp_path / "out/gpu-only/requests.parquet").read()["status"].to_pylist()
    assert (status.count(3), status.count(4)) == (rejected, skipped)
    cut = 5_000 + 5 - 2_000 if rule == "truncate" else 0
    assert described["summary"]["tokens_truncated"] == cut
    if rejected:
        assert "window" in described["summary"]["notes"][0]


@pytest.mark.parametrize(
    ("policy", "overrides", "word"),
    [
        ("gpu-only", ("kv.num_gpu_blocks=20",), "kv.gpu_kv_gib"),
        ("prefix-offload", ("kv.num_gpu_blocks=20",), "kv.gpu_kv_gib"),
        ("hybrid", ("kv.num_gpu_blocks=1500",), "kv.gpu_kv_gib"),
        ("host-resident", ("kv.num_gpu_blocks=1600",), "kv.gpu_kv_gib"),
        ("hybrid", ("kv.host_pool_gib=0.1",), "kv.host_pool_gib"),
        ("host-resident", ("kv.host_pool_gib=0.1",), "kv.host_pool_gib"),
    ],
)
def test_a_request_that_no_pool_could_ever_hold_is_refused_by_name_and_the_others_run(
    policy: str, overrides: tuple[str, ...], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = row(input_length=30_000, hash_ids=list(range(1, 60)))
    (tmp_path / "one-big.jsonl").write_bytes(lines(row(), big, row(timestamp=5)))
    sets = [argument for override in overrides for argument in ("--set", override)]
    assert replay("one-big.jsonl", "--policy", policy, "--json", *sets) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["num_finished"] == 2
    notes = json.loads((tmp_path / "out" / policy / "run.json").read_text())["summary"]["notes"]
    assert "request 1 needs" in notes[0] and word in notes[0]


def test_a_policy_that_never_admits_ends_with_the_request_that_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay("openhands", "--policy", "never-admit", "--limit", "3") == USER_ERROR
    assert "request 0" in one_line(capsys)
    nothing_written(tmp_path)


POLICY_FILES = {
    "syntax": ("class Mine(:\n", "cannot be imported"),
    "other": ("class Other: pass\n", "has no class 'Mine'"),
    "stranger": ("class Mine: pass\n", "not a subclass"),
    "unfinished": (
        "from hisparsim.serving.policy import ResidencyPolicy\n"
        "class Mine(ResidencyPolicy):\n    name = 'mine'\n    summary = 'unfinished'\n",
        "lacks the methods admission_blocks, admit, census, check, extend, fits_alone, leave, lookup, seal",
    ),
    "lawless": (
        "from hisparsim.serving.policies.gpu_only import GpuOnly\n"
        "class Mine(GpuOnly):\n"
        "    def leave(self, request, *, finished, in_flight):\n        return None\n",
        "L1",
    ),
}


@pytest.mark.parametrize("kind", list(POLICY_FILES))
def test_a_policy_file_that_is_wrong(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, word = POLICY_FILES[kind]
    (tmp_path / "mine.py").write_text(text)
    assert replay("openhands", "--policy", "mine.py:Mine", "--limit", "20", "--check") == USER_ERROR
    assert word in one_line(capsys)
    assert not (tmp_path / "out").exists()


RAISING = """
from hisparsim.serving.policies.gpu_only import GpuOnly
class Raises(GpuOnly):
    def leave(self, request, *, finished, in_flight): return {}["no such key"]
class Exits(GpuOnly):
    def leave(self, request, *, finished, in_flight): raise SystemExit(0)
class Narrow(GpuOnly):
    def leave(self, request): return None
class Born(GpuOnly):
    def __init__(self, *rest, **named): raise RuntimeError("not today")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", ("KeyError: 'no such key'", "in leave, line 4 of mine.py")),
        ("Exits", ("SystemExit",)),
        ("Narrow", ("TypeError", "finished")),
        ("Born", ("not today", "__init__")),
    ],
)
@pytest.mark.parametrize("command", ["replay", "sweep", "goodput"])
def test_what_a_policy_raises_is_told_with_its_place(
    command: str, name: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(RAISING)
    policy = f"mine.py:{name}"
    arguments = {
        "replay": ["replay", "openhands", "--policy", policy, "--out", "out"],
        "sweep": ["sweep", "--trace", "openhands", "--axis", f"policy={policy}"],
        "goodput": ["goodput", "openhands", "--policy", policy, "--slo", "ttft_s.p99=9", "--seed", "0"],
    }[command]
    assert run([*arguments, "--limit", "20", "--jobs", "1"]) == USER_ERROR
    line = one_line(capsys)
    assert all(word in line for word in (policy, *words)), line
    assert not (tmp_path / "out").exists()


def test_a_policy_file_that_leaves_the_process_when_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    assert replay("openhands", "--policy", "mine.py:Mine") == USER_ERROR
    assert "cannot be imported: SystemExit" in one_line(capsys)


PRESETS = {
    "itself": ('base = "mine.toml"\n', "based on itself"),
    "number": ("base = 3\n", "base = 3"),
    "without": ('base = "h200x8"\nwithout = 5\n', "without = 5"),
    "table": ('base = "h200x8"\n[num_gpus]\nx = 1\n', "num_gpus"),
}


@pytest.mark.parametrize("kind", list(PRESETS))
def test_a_preset_file_that_is_wrong(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, word = PRESETS[kind]
    (tmp_path / "mine.toml").write_text(text)
    assert run(["scenario", "show", "--set", "node.preset=mine.toml"]) == USER_ERROR
    captured = capsys.readouterr()
    assert word in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    "text", ["seed = true\n", "[kv]\nhot_rows = true\n", "[kv]\nhost_pool_gib = false\n"]
)
def test_a_truth_value_is_no_number(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text(text)
    assert replay("openhands", "--scenario", "mine.toml") == USER_ERROR
    assert "true or false" in one_line(capsys)


def test_an_output_directory_that_cannot_be_made_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert run(["replay", "openhands", "--out", "file/out"]) == USER_ERROR
    line = one_line(capsys)
    assert "file/out" in line and "is a file" in line


def test_a_disk_that_is_full_is_named_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        assert replay("openhands", "--limit", "30", "--policy", "gpu-only") == USER_ERROR
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "error: out: File too large; nothing is left of it" in capsys.readouterr().err
    nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["capacity", "--host-gib", "nan"], ("nan", "positive")),
        (["capacity", "--host-gib", "inf"], ("inf", "leave it out")),
        (["capacity", "--host-gib", "1e300"], ("1e+300", "leave it out")),
        (["explain", "--context", "-5"], ("-5 tokens",)),
        (["goodput", "openhands", "--slo", "ttft_s.p99=-1"], ("ttft_s.p99=-1", "below 0")),
        (["goodput", "openhands", "--slo", "ttft_s.p99=0"], ("ttft_s.p99=0", "at 0")),
        (
            ["goodput", "openhands", "--slo", "ttft_s.p99=9", "--set", "workload.concurrency=4"],
            ("workload.concurrency", "--load rate"),
        ),
        (["scenario", "from-command", "@launch.sh"], ("launch.sh", "not text")),
        (["calibrate", "--out", "."], ("is a directory",)),
        (["calibrate", "--out", "launch.sh/c.json"], ("launch.sh", "is a file")),
        (["validate", "--policy", "hybird"], ("hybird", "hybrid")),
        (["kernels", "plot", "launch.sh", "--out", "x.png"], ("launch.sh", "no CSV file")),
    ],
)
def test_a_value_out_of_range_is_named(
    arguments: list[str], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.sh").write_bytes(bytes(range(128, 256)))
    assert run(arguments) == USER_ERROR
    line = one_line(capsys)
    assert all(word in line for word in words), line


def test_a_sweep_of_which_nothing_can_run_leaves_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "--trace", "openhands", "--axis", "kv.hot_rows=1,2", "--out", "out"]) == USER_ERROR
    assert "none of the 2 scenarios can be run" in one_line(capsys)
    nothing_written(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["scenario", "show", "--set", "kv.hot_rows=1"],
        ["scenario", "show", "missing.toml"],
        ["explain", "--set", "policy.name=hybird"],
        ["capacity", "--model", "glm-6"],
        ["capacity", "--context", "-5"],
        ["capacity", "--hot-rows", "5"],
        ["capacity", "--tp", "0"],
        ["trace", "info", "missing.jsonl"],
        ["report", "missing"],
        ["compare", "missing", "missing"],
    ],
)
def test_the_other_commands_fail_in_one_line_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == USER_ERROR
    one_line(capsys)
