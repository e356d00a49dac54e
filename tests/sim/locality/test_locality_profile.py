"""Profiles: the published curve, the laws of expected misses, and the exact-LRU cross-check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsim.locality.caches import lru_misses_by_size
from hisparsim.locality.miss_curve import CurveTableError, MissCurve
from hisparsim.locality.miss_table import measure_miss_shares, table_row
from hisparsim.locality.profile import LocalityProfile, ProfileError, load_profile, profile_names
from hisparsim.specs.errors import UnknownNameError

GLM = load_profile("glm-5.1", 2048)
COHERENT = LocalityProfile("coherent", "", 2048, GLM.curve, incoherent_share=0.0)


def missed_rows(
    profile: LocalityProfile, context: int, hot_rows: int, *, resident: float = 0.0, query_tokens: int = 1
) -> float:
    pages = np.asarray([1000])
    missed = profile.missed_millirows(
        np.asarray([context]), np.asarray([round(1000 * resident)]), pages, hot_rows, query_tokens
    )
    return int(missed[0]) / 1000


REQUESTS = st.lists(
    st.tuples(st.integers(1, 1_048_576), st.integers(0, 20_000), st.integers(0, 20_000)),
    min_size=1,
    max_size=9,
)


def arrays(requests: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    context = np.asarray([context for context, _, _ in requests], dtype=np.int64)
    pages = -(-context // 64)
    return context, np.minimum(np.asarray([held for _, held, _ in requests], dtype=np.int64), pages), pages


@settings(deadline=None, max_examples=200)
@given(REQUESTS, st.integers(128, 30_000), st.integers(0, 5000), st.sampled_from(profile_names()))
def test_more_hot_rows_never_miss_more_and_never_more_than_is_selected(requests, hot_rows, more, name):
    context, resident, pages = arrays(requests)
    profile = load_profile(name, 2048)
    for query_tokens in (1, 4):
        least = query_tokens * 2048
        few, many = (
            profile.missed_millirows(context, resident, pages, max(rows, least), query_tokens)
            for rows in (hot_rows, hot_rows + more)
        )
        assert np.all(many <= few)
        outside = (1 - resident / pages) * np.minimum(context, 2048)
        assert np.all(few <= np.rint(1000 * query_tokens * outside))
        assert np.all(many >= 0)


@settings(deadline=None)
@given(REQUESTS, st.integers(2048, 32_768), st.integers(1, 4))
def test_many_requests_at_once_equal_one_by_one(requests, hot_rows, query_tokens):
    context, resident, pages = arrays(requests)
    together = GLM.missed_millirows(context, resident, pages, hot_rows, query_tokens)
    alone = [
        GLM.missed_millirows(
            context[i : i + 1], resident[i : i + 1], pages[i : i + 1], hot_rows, query_tokens
        )[0]
        for i in range(len(context))
    ]
    assert together.tolist() == alone


@given(st.integers(1, 1_048_576), st.integers(2048, 32_768))
def test_nothing_is_missed_when_all_pages_are_resident_or_the_buffer_holds_the_rest(context, hot_rows):
    pages = np.asarray([-(-context // 64)])
    assert GLM.missed_millirows(np.asarray([context]), pages, pages, hot_rows)[0] == 0
    assert missed_rows(GLM, hot_rows, hot_rows) == 0
    assert missed_rows(GLM, 2 * hot_rows, hot_rows, resident=0.5) == 0


@pytest.mark.parametrize(
    ("context", "hot_rows", "percent"),
    [
        (18_134, 4096, 3.98),
        (67_286, 2048, 26.25),
        (102_134, 4096, 11.16),
        (206_550, 8192, 6.01),
        (1_050_326, 32_768, 5.71),
    ],
)
def test_the_curve_passes_through_its_table(context, hot_rows, percent):
    assert COHERENT.miss_share(context, hot_rows) == pytest.approx(percent / 100, rel=0.01)


def test_the_layer_mean_meets_the_published_miss_table():
    # HiSparse paper, GLM-5.1, one request of 100,384 tokens, first 1,000 steps from an empty buffer (which
    # adds 0.2-0.3 points): 30 % at 2048 rows, 13.4 at 4096, 6.7 at 8192.
    shares = [GLM.miss_share(100_384, rows) for rows in (2048, 4096, 8192)]
    assert shares == pytest.approx([0.30, 0.134, 0.067], abs=0.007)


@pytest.mark.parametrize(
    ("resident", "rows", "exact"),
    [
        (0.1, 2048, 440.0), (0.1, 4096, 177.1), (0.25, 2048, 293.3), (0.25, 8192, 49.3), (0.5, 2048, 114.1),
        (0.5, 4096, 43.0), (0.5, 8192, 25.3), (0.75, 2048, 21.3), (0.75, 4096, 12.7), (0.9, 2048, 4.6),
    ],
)  # fmt: skip
def test_partly_resident_contexts_meet_exact_lru_within_3_percent(resident, rows, exact):
    # Exact simulation of the fitted process, prompt 100,384, steps 1001-2000, the newest part resident.
    assert missed_rows(COHERENT, 101_884, rows, resident=resident) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("query_tokens", "rows", "exact"),
    [(2, 4096, 445), (2, 6144, 250), (2, 8192, 174), (4, 8192, 344)],
)
def test_verify_steps_meet_exact_lru_over_unions_within_4_percent(query_tokens, rows, exact):
    # Exact simulation of the fitted process, prompt 100,384, one look-up for each union of selections.
    found = missed_rows(COHERENT, 101_884, rows, query_tokens=query_tokens)
    assert found == pytest.approx(exact, rel=0.04)


@pytest.mark.slow
def test_an_exact_lru_on_a_generated_stream_agrees_with_the_curve():
    # 16,384 tokens, top_k 2048, a growing context, steps 400-600: within 1.5 points and 12 %.
    assert GLM.process is not None
    rows = [2048, 3072, 4096, 8192]
    stream = GLM.process.selections(16_384, 2048, 600, seed=11)
    exact = lru_misses_by_size(stream, rows, skip_steps=400).mean(axis=0)
    curve = [missed_rows(COHERENT, 16_884, size) for size in rows]
    assert exact / 2048 == pytest.approx(np.asarray(curve) / 2048, rel=0.12, abs=0.002)


@pytest.mark.slow
def test_a_small_top_k_misses_as_the_curve_says_for_its_ratios():
    # tiny-dsa selects 128 rows: the curve is read at B / 128 and n / 128, short contexts among them. A
    # constant context, 1,000 steps after 1,000, four seeds: within 6 % or 0.3 rows.
    profile = load_profile("glm-5.1", 128)
    assert profile.process is not None
    for context in (192, 256, 512, 1024, 2048):
        rows = [size for size in (128, 192, 256, 512) if size < context]
        exact = np.mean(
            [
                lru_misses_by_size(
                    profile.process.selections(context, 128, 2000, seed, growing=False), rows, skip_steps=1000
                ).mean(axis=0)
                for seed in range(4)
            ],
            axis=0,
        )
        coherent = LocalityProfile("coherent", "", 128, profile.curve, incoherent_share=0.0)
        curve = [missed_rows(coherent, context, size) for size in rows]
        assert exact == pytest.approx(np.asarray(curve), rel=0.06, abs=0.3)


def test_a_bundled_table_is_what_its_command_measures():
    # One cell of low-overlap, measured as `python -m hisparsim.locality.miss_table` does.
    profile = load_profile("low-overlap", 2048)
    assert profile.process is not None
    shares = measure_miss_shares(profile.process, 16_384, (2048, 4096))
    assert table_row(shares, 16_384, (2048, 4096)) == [37.85, 19.65]


def test_profiles_differ_as_their_names_say():
    shares = {name: load_profile(name, 2048).miss_share(100_000, 4096) for name in profile_names()}
    assert shares["high-overlap"] < shares["glm-5.1"] < shares["low-overlap"] < shares["uniform"]
    assert shares["uniform"] == pytest.approx(1 - 4096 / 100_000, abs=0.001)


def test_counters_of_a_server_scale_a_profile_until_it_meets_them():
    fitted = GLM.fitted_to_counters(hits=820, misses=180, context_tokens=80_000, hot_rows=4096)
    assert fitted.miss_share(80_000, 4096) == pytest.approx(0.18, rel=0.01)
    assert fitted.miss_share(80_000, 8192) < 0.18
    with pytest.raises(ProfileError, match="hits"):
        GLM.fitted_to_counters(hits=0, misses=0, context_tokens=80_000, hot_rows=4096)
    with pytest.raises(ProfileError, match="holds"):
        GLM.fitted_to_counters(hits=5, misses=5, context_tokens=4096, hot_rows=8192)


def test_a_profile_from_a_file_lies_over_its_base(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "glm-5.1"\nsource = "mine"\n[layers]\nincoherent = 39\ntotal = 78\n')
    profile = load_profile(str(path), 2048)
    assert (profile.name, profile.source, profile.incoherent_share) == ("mine", "mine", 0.5)


def test_unknown_names_and_broken_files_are_refused_with_one_line(tmp_path):
    with pytest.raises(UnknownNameError, match="low-overlap"):
        load_profile("low-overlab", 2048)
    with pytest.raises(ProfileError, match="exist"):
        load_profile(str(tmp_path / "none.toml"), 2048)
    for text, words in [
        ("a = ", "TOML"),
        ('source = "x"\n', "lacks"),
        ('base = "glm-5.1"\nmiss_percent = [[1.0, 2.0]]\n', "misses"),
        ('base = "glm-5.1"\n[layers]\nincoherent = "x"\ntotal = 3\n', "mine"),
    ]:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(ProfileError, match=words) as caught:
            load_profile(str(path), 2048)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hot_rows", "contexts", "shares"),
    [
        ([1, 2], [8], [[0.5, 0.4]]),
        ([2, 1], [8, 16], [[0.5, 0.4], [0.5, 0.4]]),
        ([1, 2], [8, 16], [[0.4, 0.5], [0.5, 0.4]]),
        ([1, 2], [8, 16], [[0.5], [0.5, 0.4]]),
        ([1, 2], [8, 16], [[0.5, 0.0], [0.5, 0.4]]),
    ],
)
def test_tables_that_are_none_are_refused(hot_rows, contexts, shares):
    with pytest.raises(CurveTableError):
        MissCurve(1, hot_rows, contexts, shares)
