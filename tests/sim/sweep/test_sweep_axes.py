from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparsim.serving.policy import PolicyError
from hisparsim.sweep.axes import Axis, parse_axis, parse_axis_text, parse_zip
from hisparsim.sweep.definition import Definition, parse_definition, read_definition
from hisparsim.sweep.errors import SweepError
from hisparsim.sweep.grid import Condition, Point, expand


def sweep(**written: Any) -> Definition:
    return parse_definition({"trace": "conversation", **written}, Path())


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ({"start": 1, "stop": 9, "num": 3}, [1, 5, 9]),
        ({"start": 2048, "stop": 32768, "num": 5, "log": True}, [2048, 4096, 8192, 16384, 32768]),
        ({"start": 0.5, "stop": 2.0, "num": 3, "log": True}, [0.5, 1.0, 2.0]),
        ({"start": 1, "stop": 3, "num": 9}, [1, 2, 3]),
        ({"start": 7, "stop": 9, "num": 1}, [7]),
    ],
)
def test_lists_and_ranges_give_their_values(written: Any, values: list[float]) -> None:
    assert [value for (value,) in parse_axis("kv.hot_rows", written).values] == values


@given(st.floats(0.01, 10), st.floats(1.1, 100), st.integers(2, 9))
def test_a_log_range_rises_by_one_factor_and_keeps_its_ends(start: float, factor: float, num: int) -> None:
    stop = start * factor
    values = [
        v[0] for v in parse_axis("kv.host_pool_gib", dict(start=start, stop=stop, num=num, log=True)).values
    ]
    steps = [float(b) / float(a) for a, b in pairwise(values)]
    assert values[0] == pytest.approx(start) and values[-1] == pytest.approx(stop)
    assert steps == pytest.approx([factor ** (1 / (num - 1))] * (num - 1), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("policy=hybrid,gpu-only", "policy.name", ["hybrid", "gpu-only"]),
        ("kv.hot_rows=2048,4096", "kv.hot_rows", [2048, 4096]),
        ("kv.host_pool_gib=64:256:3:log", "kv.host_pool_gib", [64, 128, 256]),
        ("workload.time_scale=0.5:1.5:3", "workload.time_scale", [0.5, 1.0, 1.5]),
        ("policy=my/policy.py:Mine", "policy.name", ["my/policy.py:Mine"]),
        ("kv.hot_rows=null,4096", "kv.hot_rows", [None, 4096]),
        ("policy.wait_for_write_back=true,false", "policy.wait_for_write_back", [True, False]),
    ],
)
def test_axes_can_be_given_on_the_command_line(text: str, key: str, values: list[Any]) -> None:
    axis = parse_axis_text(text)
    assert axis.keys == (key,)
    assert [value for (value,) in axis.values] == values


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sweep(axes={"kv.hot_row": [1]}),
            "unknown scenario key 'kv.hot_row' (did you mean 'kv.hot_rows'?)",
        ),
        (lambda: sweep(axis={}), "unknown key 'axis' in the sweep file (did you mean 'axes'?)"),
        (lambda: sweep(axes={"kv.hot_rows": []}), "axis kv.hot_rows is empty"),
        (lambda: parse_axis_text("kv.hot_rows="), "axis kv.hot_rows is empty"),
        (lambda: sweep(axes={"kv.hot_rows": {"start": 1, "stop": 2}}), "'num' is missing"),
        (lambda: sweep(axes={"kv.hot_rows": 7}), "give a list, or a range"),
        (lambda: sweep(axes={"kv.hot_rows": [[1, 2]]}), "is not a single value"),
        (lambda: sweep(axes={"kv.hot_rows": {"start": 0, "stop": 2, "num": 2, "log": True}}), "above 0"),
        (lambda: sweep(axes={"kv.hot_rows": [1, 1]}), "given twice"),
        (lambda: sweep(zip=[{"keys": ["seed", "kv.hot_rows"], "values": [[1]]}]), "1 entries"),
        (lambda: sweep(zip={"keys": []}), "[[zip]]"),
        (lambda: sweep(seeds=[1, 1]), "seeds = [1, 1]"),
        (lambda: sweep(limit=0), "limit = 0"),
        (lambda: sweep(objectives={"maximise": []}), "[objectives] takes"),
        (
            lambda: sweep(objectives={"maximize": ["output_token_per_s"]}),
            "did you mean 'output_tokens_per_s'?",
        ),
        (lambda: sweep(objectives={"maximize": ["bound_by"]}), "is text"),
        (lambda: sweep(objectives={"maximize": ["e2e_s.p50"], "minimize": ["e2e_s.p50"]}), "given twice"),
        (lambda: sweep(constraints={"ttft_s.p99": {"max": 1, "min": 2}}), "contradictory constraint"),
        (lambda: sweep(constraints={"ttft_s.p99": 3}), "give {max = ..}"),
        (lambda: sweep(trace=["a", "a"]), "named twice"),
        (lambda: sweep(set={"kv.hot_rows": [1]}), "several make an axis"),
    ],
)
def test_a_wrong_sweep_is_one_line_that_says_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(SweepError) as raised:
        make()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


POLICIES = {"policy": ["hybrid", "gpu-only"]}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"axes": POLICIES, "when": [{"key": "kv.hot_rows", "if": {"policy.name": ["hybrid"]}}]},
            "it is no axis",
        ),
        (
            {"axes": {"kv.hot_rows": [2048]}, "when": [{"key": "kv.hot_rows", "if": {"kv.dtype": ["bf16"]}}]},
            "neither an axis nor in [set]",
        ),
        (
            {
                "axes": {**POLICIES, "kv.hot_rows": [2048]},
                "when": [{"key": "kv.hot_rows", "if": {"policy": ["thrash"]}}],
            },
            "contradictory condition: kv.hot_rows only if policy.name is thrash",
        ),
        (
            {
                "axes": {"kv.hot_rows": [2048], "kv.dtype": ["bf16"]},
                "when": [
                    {"key": "kv.hot_rows", "if": {"kv.dtype": ["bf16"]}},
                    {"key": "kv.dtype", "if": {"kv.hot_rows": [2048]}},
                ],
            },
            "contradictory conditions",
        ),
        (
            {
                "axes": {**POLICIES, "kv.hot_rows": [2048]},
                "when": [
                    {"key": "kv.hot_rows", "if": {"policy": ["hybrid"]}},
                    {"key": "kv.hot_rows", "if": {"policy": ["gpu-only"]}},
                ],
            },
            "no combination of the axes ever sets kv.hot_rows",
        ),
        ({"axes": POLICIES, "set": {"policy": "hybrid"}}, "in [set] and an axis"),
        ({"axes": {"policy": ["hybrid"], "policy.name": ["gpu-only"]}}, "an axis twice"),
        ({"axes": {"seed": [1, 2]}}, "seed is no axis"),
    ],
)
def test_contradictory_conditions_are_named(written: dict[str, Any], message: str) -> None:
    with pytest.raises(SweepError) as raised:
        sweep(**written).points()
    assert message in str(raised.value)


def test_a_misspelt_policy_ends_the_sweep_before_anything_runs() -> None:
    with pytest.raises(PolicyError, match="did you mean 'hybrid'"):
        sweep(axes={"policy": ["hybrit"]}).points()


values = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)


@given(
    values,
    values,
    values,
    st.sets(st.integers(0, 3)),
    st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
)
def test_the_grid_holds_each_allowed_combination_once_in_the_order_of_the_axes(
    a: list[int], b: list[int], c: list[int], allowed: set[int], seeds: list[int]
) -> None:
    """Against plain nested loops with a dictionary of what was seen."""
    axes = [Axis((key,), tuple((v,) for v in vs)) for key, vs in (("a", a), ("b", b), ("c", c))]
    condition = Condition("b", {"a": tuple(sorted(allowed))})
    if not allowed & set(a):
        with pytest.raises(SweepError):
            expand(["t"], axes, seeds, {}, [condition])
        return
    expected = []
    for va, vb, vc, seed in product(a, b, c, seeds):
        point = {"a": va, "b": vb, "c": vc} if va in allowed else {"a": va, "c": vc}
        if (point, seed) not in expected:
            expected.append((point, seed))
    got = [(dict(p.values), p.seed) for p in expand(["t"], axes, seeds, {}, [condition])]
    assert sorted(map(str, got)) == sorted(map(str, expected))
    if len(b) == 1 or allowed >= set(a):
        assert got == expected


def test_a_condition_on_a_key_that_is_not_set_does_not_hold() -> None:
    axes = [Axis(("a",), ((0,), (1,))), Axis(("b",), ((5,),)), Axis(("c",), ((9,),))]
    conditions = [Condition("b", {"a": (1,)}), Condition("c", {"b": (5,)})]
    points = expand(["t"], axes, [None], {}, conditions)
    assert [dict(point.values) for point in points] == [{"a": 0}, {"a": 1, "b": 5, "c": 9}]


def test_zipped_axes_move_together() -> None:
    zipped = parse_zip({"keys": ["kv.host_pool_gib", "kv.prefix_offload_gib"], "values": [[1, 2], [3, 4]]})
    points = expand(["t"], [zipped], [None], {}, [])
    assert [tuple(point.values.values()) for point in points] == [(1, 2), (3, 4)]


def test_the_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    import hisparsim.sweep.definition as module

    text = (module.__doc__ or "").split("\n\n", 1)[1].replace('scenario = "base.toml"', "")
    path = tmp_path / "sweep.toml"
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()), encoding="utf-8")
    definition = read_definition(path)
    assert definition.seeds == (0, 1, 2)
    assert len(definition.points()) == (3 * 3 + 3) * 2 * 3
    assert definition.points()[0] == Point(
        "conversation",
        0,
        {
            "policy.name": "hybrid",
            "kv.hot_rows": 2048,
            "workload.time_scale": 0.5,
            "kv.host_pool_gib": 256,
            "kv.prefix_offload_gib": 256,
        },
    )


def test_an_axis_of_the_command_line_takes_the_place_of_the_files() -> None:
    base = sweep(axes={"policy": ["hybrid"], "kv.hot_rows": [2048]})
    changed = base.with_options(
        axes=[parse_axis_text("kv.hot_rows=4096,8192")], limit=5, sets=["kv.dtype=bf16"]
    )
    assert [point.values["kv.hot_rows"] for point in changed.points()] == [4096, 8192]
    assert changed.limit == 5
    assert changed.fixed == {"kv.dtype": "bf16"}
