"""A run played through in seconds, on the real admission and launching code."""

from knit_data.simulation.compare import PACED, compare
from knit_data.simulation.run import ADMISSIONS, Report, simulate
from knit_data.simulation.scenario import PRESETS, Scenario, Source, preset

__all__ = ["ADMISSIONS", "PACED", "PRESETS", "Report", "Scenario", "Source", "compare", "preset", "simulate"]
