"""Tables, figures and pages drawn from run directories."""

from .errors import ReportError

__all__ = ["ReportError"]
