"""Several daemons behind one face: `placement` has the rule, `core` watches the daemons and places prompts."""

from kvservice.client.cluster.aio import AsyncCluster
from kvservice.client.cluster.blocking import Cluster
from kvservice.client.cluster.core import ClusterDaemon
from kvservice.client.cluster.placement import (
    Candidate,
    HashedPrompt,
    Load,
    PlacedPrompt,
    Placement,
    PlacementSettings,
)

__all__ = [
    "AsyncCluster",
    "Candidate",
    "Cluster",
    "ClusterDaemon",
    "HashedPrompt",
    "Load",
    "PlacedPrompt",
    "Placement",
    "PlacementSettings",
]
