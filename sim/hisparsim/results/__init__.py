"""Records of a run, the metrics computed from them, and the run directory."""

from .errors import ResultError, RunDirectoryError
from .records import REQUEST_COLUMNS, SERVED, STEP_COLUMNS, RequestStatus, RunResult

__all__ = [
    "REQUEST_COLUMNS",
    "SERVED",
    "STEP_COLUMNS",
    "RequestStatus",
    "ResultError",
    "RunDirectoryError",
    "RunResult",
]
