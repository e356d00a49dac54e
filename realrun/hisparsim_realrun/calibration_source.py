"""Where a validation's calibration comes from: a file, or probes spread over the time of the validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hisparsim.cost.calibration_file import read_calibration, write_calibration
from hisparsim.specs.scenario import Scenario

from .calibration import fitted, probe_links
from .calibration_probe import SEED, StepSamples, probes_of, run_probes
from .options import RunOptions

NUM_PASSES = 3
"""How often the probes are played, each time with other requests: as a cell's rounds, at many moments."""
FIRST_SHARE = 0.1
"""Share of the probes that run before anything else, for a first fit."""
Progress = Callable[[str], None]


class CalibrationSource(Protocol):
    """A calibration that a validation uses; ``file`` can be read from the first call on."""

    file: Path

    def begin(self) -> Path:
        """Change: make sure that there is a calibration to plan with; returns its file."""

    def between(self, done: int, total: int) -> None:
        """Change: use the pause after ``done`` of ``total`` measured cells."""

    def finish(self) -> Path:
        """Change: the calibration that counts; returns its file."""


class FileCalibration:
    """A calibration that was made before."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self) -> Path:
        """Query: the file, read once to see that it is one."""
        read_calibration(self.file)
        return self.file

    def between(self, done: int, total: int) -> None:
        """Query: nothing is left to measure."""

    def finish(self) -> Path:
        """Query: the same file."""
        return self.file


class SpreadCalibration:
    """Probes of which some run first and the others between the cells; fitted again at the end."""

    def __init__(
        self,
        scenario: Scenario,
        options: RunOptions,
        file: Path,
        *,
        scale: float = 1.0,
        progress: Progress | None = None,
    ) -> None:
        self.file = file
        self._scenario = scenario
        self._options = options
        self._progress = progress
        self._probes = [
            probe
            for number in range(NUM_PASSES)
            for probe in probes_of(scenario, scale=scale, seed=SEED + 1000 * number)
        ]
        self._first = max(round(FIRST_SHARE * len(self._probes)), 1)
        self._next = 0
        self._samples: list[StepSamples] = []

    def begin(self) -> Path:
        """Change: measure the links and the first probes."""
        self._links = probe_links(self._scenario, self._options)
        self._run_until(self._first)
        return self.finish()

    def between(self, done: int, total: int) -> None:
        """Change: run the probes that are due by now."""
        self._run_until(self._first + round((len(self._probes) - self._first) * done / total))

    def finish(self) -> Path:
        """Change: fit what was measured so far and write the file."""
        samples = StepSamples.joined(self._samples)
        write_calibration(fitted(self._scenario, self._options, samples, self._links), self.file)
        return self.file

    def _run_until(self, count: int) -> None:
        if count > self._next:
            chosen = self._probes[self._next : count]
            self._samples.append(run_probes(self._scenario, chosen, self._options, self._progress))
            self._next = count
