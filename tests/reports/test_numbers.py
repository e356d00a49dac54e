import pytest

from hisparsim_reports.numbers import byte_count, count, ratio, seconds, share, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (12e-6, "12.0 µs"),
        (0.0421, "42.1 ms"),
        (0.99999, "1.00 s"),
        (12.34, "12.3 s"),
        (599.0, "599 s"),
        (1200.0, "20.0 min"),
        (36_000.0, "10.0 h"),
    ],
)
def test_durations_take_the_unit_that_suits_their_size(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.999, "10.0"),
        (0.001234, "0.00123"),
        (1.0, "1.00"),
        (45.67, "45.7"),
        (1234.6, "1,235"),
        (1.2e7, "12,000,000"),
    ],
)
def test_numbers_keep_three_digits_and_never_turn_scientific(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_bytes_counts_shares_and_factors_carry_their_unit() -> None:
    assert (byte_count(0), byte_count(1.5e9), byte_count(2e12)) == ("0 B", "1.50 GB", "2.00 TB")
    assert (count(4_000), count(48_123_456)) == ("4,000", "48.1 M")
    assert (share(0.9234), share(0.9987), share(0.0004), share(None)) == ("92.3 %", "99.87 %", "0.04 %", "–")
    assert ratio(2.314) == "2.31×"
