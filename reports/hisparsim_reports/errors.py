"""Errors of reports: one clear line each."""

from __future__ import annotations


class ReportError(ValueError):
    """A report or comparison cannot be made from what was given."""
