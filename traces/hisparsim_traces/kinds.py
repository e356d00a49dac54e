"""What kind of request each row is, in the source's own words: a small code a row, and their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_KINDS = 256  # a column of more different values is no kind of request; the rest share one name
MAX_NAME = 64
OTHER = "(other kinds)"

Codes = NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kind of each of n rows.

    Attributes:
        names: distinct, none empty, at most MAX_KINDS + 1.
        codes: [n] index into names, -1 for a row of which the source says nothing.
    """

    names: tuple[str, ...]
    codes: Codes

    def __len__(self) -> int:
        return len(self.codes)

    def of(self, row: int) -> str | None:
        """The kind of one row, None where the source has none."""
        code = int(self.codes[row])
        return None if code < 0 else self.names[code]

    def take(self, rows: slice | NDArray[Any]) -> Kinds | None:
        """The kinds of some rows, as `compact` puts them."""
        return compact(self.names, self.codes[rows])

    def counts(self) -> dict[str, int]:
        """Rows by kind, the most frequent first; rows without one are left out."""
        numbers = np.bincount(self.codes[self.codes >= 0], minlength=len(self.names)).tolist()
        return most_first(zip(self.names, numbers, strict=True))


def most_first(counted: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Counts above 0, the largest first, equal ones by name."""
    return dict(sorted(((n, c) for n, c in counted if c), key=lambda pair: (-pair[1], pair[0])))


def compact(names: tuple[str, ...], codes: Codes) -> Kinds | None:
    """The same kinds with the names in order of first appearance, unused ones left out; None where no row
    has one.
    """
    used, first = np.unique(codes[codes >= 0], return_index=True)
    if not len(used):
        return None
    order = used[np.argsort(first)]
    number = np.full(len(names) + 1, -1, np.int16)  # the last entry is that of code -1
    number[order] = np.arange(len(order))
    return Kinds(tuple(names[code] for code in order.tolist()), number[codes])


def joined(parts: Iterable[tuple[Kinds | None, int]]) -> Kinds | None:
    """The kinds of parts, each given with its number of rows, one after the other."""
    book = KindBook()
    codes = [np.zeros(0, np.int16)]
    for kinds, num_rows in parts:
        if kinds is None:
            codes.append(np.full(num_rows, -1, np.int16))
        else:
            number = np.array([*(book.code(name) for name in kinds.names), -1], np.int16)
            codes.append(number[kinds.codes])
    return compact(tuple(book.known), np.concatenate(codes))


@dataclass
class KindBook:
    """The names seen so far in a file, each with its code."""

    known: dict[str, int] = field(default_factory=dict)

    def code(self, value: object) -> int:
        """The code of a value as a file has it: text or a whole number; -1 for anything else, or nothing.

        New names are remembered. Characters that cannot be printed become "?".
        """
        if type(value) is int:
            value = str(value) if abs(value) < 1 << 63 else ""
        if type(value) is not str:
            return -1
        code = self.known.get(value)
        if code is not None:
            return code
        name = "".join(c if c.isprintable() else "?" for c in value[: 2 * MAX_NAME].strip()[:MAX_NAME])
        if not name:
            return -1
        if name not in self.known and len(self.known) >= MAX_KINDS:
            name = OTHER
        return self.known.setdefault(name, len(self.known))

    def of_rows(self, column: Any | None, rows: NDArray[np.bool_]) -> Kinds | None:
        """The kinds of some rows of a pyarrow text column; None without such a column. [n] -> [rows.sum()]"""
        import pyarrow as pa
        import pyarrow.compute as pc

        if column is None:
            return None
        encoded = pc.dictionary_encode(column if rows.all() else column.filter(pa.array(rows)))
        number = np.array([*(self.code(text) for text in encoded.dictionary.to_pylist()), -1], np.int16)
        return self.kinds(number[np.asarray(pc.fill_null(encoded.indices, -1))])

    def kinds(self, codes: Codes) -> Kinds:
        """Rows of the given codes, with every name seen so far."""
        return Kinds(tuple(self.known), codes)
