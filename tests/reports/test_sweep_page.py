import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hisparsim_reports.errors import ReportError
from hisparsim_reports.sweep_data import SweepData
from hisparsim_reports.sweep_figures import draw_sweep, front_of
from hisparsim_reports.sweep_page import render_sweep_page, sweep_paragraph, write_sweep_report


def row(policy: str, speed: float, throughput: float, **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "seed": 0, **more, "ttft_s.p99": 100 / throughput, "tpot_s.p50": 1 / speed,
        "output_tokens_per_s": 8 * throughput, "tokens_per_s_per_user": speed,
        "total_tokens_per_s_per_gpu": throughput, "bound_by": "compute", "feasible": True, "pareto": False,
        "error": None,
    }  # fmt: skip


def rows(axes: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        found = [{**one, name: value} for one in found for value in values]
    return [
        row(policy, 5 + i + 10 * (policy == "hybrid"), 100 + 7 * i, **point)
        for policy in ("hybrid", "gpu-only")
        for i, point in enumerate(found)
    ]


def data(axes: dict[str, Sequence[float]], **more: Any) -> SweepData:
    return SweepData("small", ("policy", *axes), rows(axes), **more)


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({}, ["front"]),
        ({"kv.hot_rows": [2048, 4096, 8192]}, ["front", "lines"]),
        ({"kv.hot_rows": [2048, 4096], "kv.host_pool_gib": [64.0, 128.0]}, ["front", "heat"]),
        ({"a": [1, 2], "b": [1, 20], "c": [3, 4]}, ["front", "heat", "parallel"]),
        ({"seed": [0, 1]}, ["front"]),
    ],
)
def test_the_figures_follow_the_shape_of_the_sweep(
    axes: dict[str, Sequence[float]], names: list[str]
) -> None:
    assert [figure.name for figure in draw_sweep(data(axes))] == names


def test_nothing_is_drawn_of_a_single_scenario() -> None:
    assert draw_sweep(SweepData("one", (), [row("hybrid", 1, 1)])) == []


def test_equal_sweeps_give_equal_bytes() -> None:
    axes = {"a": [1, 2], "b": [1, 20], "c": [3, 4]}
    figures = [draw_sweep(data(axes)) for _ in range(2)]
    assert figures[0] == figures[1]
    pages = [render_sweep_page(data(axes), drawn) for drawn in figures]
    assert pages[0] == pages[1]


def test_the_front_holds_what_none_beats_in_both() -> None:
    assert front_of([(1, 9), (2, 5), (3, 7), (4, 1), (1, 3)]) == [(1, 9), (3, 7), (4, 1)]


def test_the_page_holds_every_row_and_needs_no_network(tmp_path: Path) -> None:
    page = write_sweep_report(data({"kv.hot_rows": [2048, 4096]}), tmp_path).read_text("utf-8")
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert embedded
    told = json.loads(embedded.group(1))
    assert len(told["rows"]) == 4
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_text_of_a_scenario_cannot_leave_its_place() -> None:
    nasty = '</script><img src=x onerror="alert(1)">'
    failed = {**row("hybrid", 1, 1), "error": nasty}
    page = render_sweep_page(SweepData(nasty, ("policy",), [row(nasty, 1, 2), failed]), [])
    assert "<img src=x" not in page
    assert page.count("</script>") == 2


def test_failed_scenarios_are_listed_and_counted() -> None:
    sweep = SweepData("t", ("policy",), [row("hybrid", 1, 1), {**row("thrash", 1, 1), "error": "Wedged: no"}])
    assert "Wedged: no" in render_sweep_page(sweep, [])
    assert "1 of them failed" in sweep_paragraph(sweep)


def test_the_paragraph_names_the_best_scenario_that_meets_the_constraints() -> None:
    found = rows({"kv.hot_rows": [2048, 4096]})
    found[1]["feasible"] = False
    sweep = SweepData(
        "t", ("policy", "kv.hot_rows"), found, (("output_tokens_per_s", True),), ("ttft_s.p99 <= 1",)
    )
    told = sweep_paragraph(sweep)
    assert "3 meet ttft_s.p99 <= 1." in told
    assert "The highest output tokens/s is 856, with policy gpu-only, kv.hot_rows 4096." in told


def test_a_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="at least one scenario"):
        write_sweep_report(SweepData("t", (), []), tmp_path)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the page with")
def test_a_browser_fills_sorts_and_filters_the_table(tmp_path: Path) -> None:
    page = write_sweep_report(data({"kv.hot_rows": [2048, 4096]}), tmp_path)
    actions = """{
    const heads = () => [...document.querySelectorAll("#head button")];
    const lines = () => [...document.querySelectorAll("#body tr")];
    const click = name => heads().find(button => button.textContent.startsWith(name)).click();
    const cells = () => lines().map(line => line.children[1].textContent).join(" ");
    click("kv.hot_rows"); const down = cells();
    click("kv.hot_rows"); const up = cells();
    const limit = document.querySelector("input.limit"); limit.value = "0.95"; limit.oninput();
    const limited = cells();
    const policy = document.querySelector("#filters select"); policy.value = "hybrid"; policy.onchange();
    const dots = document.querySelectorAll("#plot circle").length;
    document.title = [down, up, limited, cells(), dots].join(" | ");
    }"""
    text = page.read_text("utf-8").replace("draw();\n</script>", f"draw();\n{actions}\n</script>")
    page.write_text(text, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    except subprocess.TimeoutExpired:
        pytest.skip("the browser did not answer in two minutes")
    found = re.search(r"<title>(.*?)</title>", shown)
    assert found
    down = "4,096 4,096 2,048 2,048"
    up = "2,048 2,048 4,096 4,096"
    assert found.group(1) == f"{down} | {up} | 4,096 4,096 | 4,096 | 1"
