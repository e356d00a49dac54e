"""Errors of results: one clear line each, saying what, the value, the rule and what to do."""

from __future__ import annotations


class ResultError(ValueError):
    """A result, or the data it is made of, breaks a rule of its record."""


class RunDirectoryError(ResultError):
    """A run directory that exists already, is missing, or is not one."""
