import re
import shlex
from pathlib import Path

import pytest
from synthetic_run import synthetic_run

from hisparsim.cli.app import run
from hisparsim.results.metrics import compute_metrics
from hisparsim.results.records import REQUEST_COLUMNS, RequestStatus

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def unwrapped(page: Path) -> str:
    """A page's text with commands that go on over several lines on one."""
    return re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `$ hisparsim ...` line of the documentation."""
    lines = [(page.name, line) for page in PAGES for line in unwrapped(page).splitlines()]
    shown = [(name, re.match(r"\s*\$ (hisparsim .*)", line)) for name, line in lines]
    return [(name, re.split(r"\s[|>#]", match.group(1))[0]) for name, match in shown if match]


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_in_the_documentation_takes_the_flags_it_is_shown_with(page: str, line: str) -> None:
    assert run([*shlex.split(line)[1:], "--help"]) == 0, page


def test_the_page_on_metrics_names_every_metric_and_status() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    names = {name.split(".")[0] for name in compute_metrics(synthetic_run(num_requests=5)).flat()}
    for name in names:
        assert f"`{name}`" in text, name
    for status in RequestStatus:
        assert re.search(rf"\b{status.value} \w", text), status
    times = [name for name in REQUEST_COLUMNS if name.endswith("_ns")]
    assert all(f"`{name}`" in text for name in times)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
