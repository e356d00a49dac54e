"""Figures of a report: one file each, all in one style."""

from .draw import FIGURES, Figure, draw_all

__all__ = ["FIGURES", "Figure", "draw_all"]
