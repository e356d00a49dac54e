import json
from pathlib import Path

from hisparsim.cli.app import run
from hisparsim.results.directory import RUN_FILE, VARYING_FIELDS


def content(path: Path) -> object:
    """What must be equal: the bytes, or run.json without its fields of machine and time."""
    if path.name != RUN_FILE:
        return path.read_bytes()
    described = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in described.items() if name not in VARYING_FIELDS}


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_processes(tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        arguments = ["replay", "openhands", "--limit", "24", "--policy", "gpu-only", "--policy", "hybrid"]
        assert run([*arguments, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
    one, two = (sorted(path for path in (tmp_path / jobs).rglob("*") if path.is_file()) for jobs in "12")
    names = [
        [path.relative_to(tmp_path / jobs) for path in paths] for jobs, paths in (("1", one), ("2", two))
    ]
    assert names[0] == names[1]
    assert len(one) > 10
    for first, second in zip(one, two, strict=True):
        assert content(first) == content(second), first.name
