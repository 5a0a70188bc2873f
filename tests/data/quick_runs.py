"""Define the settings of quick runs that test data sets."""

from typing import Any

FAST: dict[str, Any] = {
    "runtime": "inprocess",
    "tracking": "none",
    "rounds": 2,
    "schedule.cohort": 2,
    "partition": "iid",
    "partition.clients": 3,
}
