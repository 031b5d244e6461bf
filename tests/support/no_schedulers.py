"""The reading of the observer from a daemon in which no scheduler was opened."""

import numpy as np

from kvservice.scheduler import SchedulerFigures
from kvservice.scheduler.stats import WIDTH
from kvservice.telemetry.scheduling import SchedulerReading

NO_SCHEDULERS = SchedulerReading(0, SchedulerFigures(), np.zeros((2, WIDTH), np.int64), np.zeros(2))
