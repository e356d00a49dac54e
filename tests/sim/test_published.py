"""Published serving results are reproduced with one parameter set."""

import pytest

from hisparsim.published.points import UnknownSetError, published_points, simulate_point


def test_a_lone_conversation_meets_the_published_token_time_and_throughput() -> None:
    lone = [p for p in published_points("openhands") if p.label.endswith("no MTP, 1 users")]
    assert len(lone) == 2
    for point in lone:
        errors = simulate_point(point).errors()
        assert abs(errors["tpot_s.mean"]) < 0.02, point.label
        assert abs(errors["total_tokens_per_s"]) < 0.10, point.label


def test_ordinary_offload_at_eight_users_is_within_its_published_figures() -> None:
    point = next(p for p in published_points("openhands") if p.label == "prefix-offload, no MTP, 8 users")
    errors = simulate_point(point).errors()
    assert abs(errors["tpot_s.mean"]) < 0.15
    assert abs(errors["total_tokens_per_s"]) < 0.20


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(UnknownSetError, match="openhands, glm-5"):
        list(published_points("gpt"))
