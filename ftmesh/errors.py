"""Every error ftmesh raises on purpose.

Each message says what was given, what the rule is, and what to do instead.
"""


class FtmeshError(Exception):
    """Base of all ftmesh errors; catch this to catch them all."""


class ArgumentError(FtmeshError, ValueError):
    """An argument is not of the form it must have."""


class TopologyError(FtmeshError, ValueError):
    """The mesh, the failed blocks or the devices described do not make a topology."""


class RoutingError(FtmeshError, ValueError):
    """No route exists, or a set of routes could deadlock."""


class ScheduleError(FtmeshError, ValueError):
    """The transfers given do not form valid rounds."""


class PlanError(FtmeshError, ValueError):
    """An algorithm cannot serve this topology; the message names one that can."""


class VerificationError(FtmeshError):
    """A schedule breaks one of its promises."""


class ScheduleFileError(FtmeshError, ValueError):
    """A file is not a readable ftmesh schedule."""


class CollectiveError(FtmeshError, ValueError):
    """A collective was called where, or on what, its plan does not fit."""


class DataError(FtmeshError, ValueError):
    """Training data is missing, incomplete or not what it should be."""


class RecordError(DataError):
    """A single record is damaged; the others can be used."""


class CheckpointError(FtmeshError, ValueError):
    """A checkpoint does not fit the run, or would be overwritten by it."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file, or has one that is not as it was written."""


class TrainingError(FtmeshError):
    """A run cannot go on."""


class ClusterError(FtmeshError):
    """The processes of a run do not agree, or one of them is missing, late or has failed."""


class TopologyWarning(UserWarning):
    """Something about the devices was decided for the user and is worth knowing."""
