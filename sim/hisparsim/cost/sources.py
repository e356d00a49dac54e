"""The table of cost sources: scenario key `cost.source` -> the model it makes."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from hisparsim.cost.calibrated import CalibratedModel
from hisparsim.cost.model import CostModel
from hisparsim.cost.roofline import RooflineModel
from hisparsim.specs.errors import ScenarioError
from hisparsim.specs.scenario import Scenario
from hisparsim.specs.sections import CostSource

SOURCES: MappingProxyType[CostSource, Callable[[Scenario], CostModel]] = MappingProxyType(
    {CostSource.ROOFLINE: RooflineModel.of, CostSource.CALIBRATION: CalibratedModel.of}
)


def cost_model(scenario: Scenario) -> CostModel:
    """Query: the cost model that a scenario asks for.

    Raises ScenarioError where its source is not in the table, or its file cannot be used.
    """
    source = scenario.cost.source
    if source not in SOURCES:
        known = ", ".join(known.value for known in SOURCES)
        raise ScenarioError(
            f"cost.source = {source.value}: this version prices steps by {known} only; set it to that"
        )
    return SOURCES[source](scenario)
