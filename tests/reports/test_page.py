import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import synthetic_run

from hisparsim.results import RequestStatus, RunResult
from hisparsim_reports.errors import ReportError
from hisparsim_reports.figures import draw_all
from hisparsim_reports.narrative import paragraph
from hisparsim_reports.page import render_page, setting_rows, write_report
from hisparsim_reports.tables import cost_table, policy_table


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    return [synthetic_run(policy, num_requests=120, rate_per_s=6.0) for policy in ("gpu-only", "hybrid")]


def test_the_page_stands_alone_and_lies_beside_its_figures(runs: list[RunResult], tmp_path: Path) -> None:
    page = write_report(runs, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "url(" not in text and "<script" not in text
    drawn = {figure.name for figure in draw_all(runs)}
    assert {path.stem for path in tmp_path.glob("*.png")} == drawn
    assert text.count("data:image/png;base64,") == len(drawn)
    for run in runs:
        assert run.policy in text


def test_text_of_the_trace_is_escaped(runs: list[RunResult]) -> None:
    named = replace(runs[0], trace={**runs[0].trace, "name": "<script>alert(1)</script>"})
    assert "<script>" not in render_page([named], [])


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="at least one run"):
        write_report([], tmp_path)


def test_settings_show_where_each_value_came_from() -> None:
    resolved = [
        {"key": "kv.hot_rows", "value": 4096, "origin": "derived", "source": "(query_len + 1) x top_k"}
    ]
    (row,) = setting_rows({"kv": {}, "resolved": resolved})
    assert (row.key, row.value, row.origin, row.source) == (
        "kv.hot_rows",
        "4,096",
        "derived",
        "(query_len + 1) x top_k",
    )


def test_the_paragraph_gives_ratios_load_and_what_binds(runs: list[RunResult]) -> None:
    text = paragraph(runs)
    assert "hybrid does best" in text
    assert re.search(r"median wait [\d.]+× shorter", text)
    assert "what the node can sustain is 1.80× under gpu-only; 0.70× under hybrid." in text
    assert "GPU memory for KV under gpu-only; nothing but the arrivals under hybrid" in text
    assert "GPU memory is taken as reported" in text


def test_the_paragraph_names_requests_that_did_not_run_to_their_end(runs: list[RunResult]) -> None:
    status = runs[0].requests["status"].copy()
    status[:3] = int(RequestStatus.REJECTED)
    rejecting = replace(runs[0], requests={**runs[0].requests, "status": status})
    assert "Under gpu-only 3 rejected." in paragraph([rejecting])
    none = np.full(len(status), int(RequestStatus.REJECTED))
    nothing = replace(runs[0], requests={**runs[0].requests, "status": none})
    assert "Under gpu-only no request finished." in paragraph([nothing])


def test_a_policy_that_never_does_better_is_not_praised(runs: list[RunResult]) -> None:
    again = replace(runs[0], policy="thrash")
    assert "No other policy does better." in paragraph([runs[0], again])


def test_tables_have_a_row_a_policy_and_shares_that_add_up(runs: list[RunResult]) -> None:
    table = policy_table(runs)
    assert [row[0] for row in table.rows] == ["gpu-only", "hybrid"]
    assert all(len(row) == len(table.headers) for row in table.rows)
    costs = cost_table(runs)
    assert costs is not None
    for column in range(1, len(costs.headers)):
        assert sum(float(row[column].split()[0]) for row in costs.rows) == pytest.approx(100, abs=0.3)
