"""Errors of sweeps: one clear line each, saying what, the value, the rule and what to do."""

from __future__ import annotations


class SweepError(ValueError):
    """A sweep, search or objective that cannot be run as written."""


class SweepDirectoryError(SweepError):
    """An output directory that cannot be written, or that belongs to something else."""


class MissingLibraryError(SweepError):
    """An executor or a search needs a package of an extra that is not installed."""
