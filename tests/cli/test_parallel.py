import pytest
from fake_simulation import square

from hisparsim.cli.parallel import run_each


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_come_in_the_items_order_whatever_the_number_of_workers(num_workers: int) -> None:
    reported: dict[int, int] = {}
    heard: dict[int, int] = {}
    results = run_each(square, [3, 1, 2], num_workers, reported.__setitem__, heard.__setitem__)
    assert results == [9, 1, 4]
    assert reported == {0: 3, 1: 1, 2: 2}
    assert heard == {0: 9, 1: 1, 2: 4}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_first_error_is_raised_as_itself(num_workers: int) -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        run_each(square, [2, -1, 3], num_workers, lambda *_: None, lambda *_: None)
