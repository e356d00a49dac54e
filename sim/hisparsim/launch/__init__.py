"""Launch lines of real servers, translated into scenarios."""

from __future__ import annotations

from hisparsim.launch.command import LaunchError
from hisparsim.launch.translate import Translation, translate_command

__all__ = ["LaunchError", "Translation", "translate_command"]
