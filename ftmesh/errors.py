"""Every error ftmesh raises on purpose.

Each message says what was given, what the rule is, and what to do instead.
"""

# Exit statuses of commands, by what ends them; `ftmesh --help` lists them. Those above 2 are
# the ones that sysexits.h has for wrong data, no input and unavailable.
USAGE, PROVED_WRONG, NOT_FOUND, REFUSED = 2, 65, 66, 69


class FtmeshError(Exception):
    """Base of all ftmesh errors; catch this to catch them all."""

    status = REFUSED


class ArgumentError(FtmeshError, ValueError):
    """An argument is not of the form it must have."""

    status = USAGE


class TopologyError(FtmeshError, ValueError):
    """The mesh, the failed blocks or the devices described do not make a topology."""

    status = USAGE


class RoutingError(FtmeshError, ValueError):
    """No route exists, or a set of routes could deadlock."""


class ScheduleError(FtmeshError, ValueError):
    """The transfers given do not form valid rounds."""


class PlanError(FtmeshError, ValueError):
    """An algorithm cannot serve this topology; the message names one that can."""


class VerificationError(FtmeshError):
    """A schedule breaks one of its promises."""

    status = PROVED_WRONG


class ScheduleFileError(FtmeshError, ValueError):
    """A file is not a readable ftmesh schedule."""


class ScheduleNotFoundError(ScheduleFileError):
    """There is no such file."""

    status = NOT_FOUND


class UnreadableError(FtmeshError):
    """JAX cannot print a program that was compiled."""


class CollectiveError(FtmeshError, ValueError):
    """A collective was called where, or on what, its plan does not fit."""


class DataError(FtmeshError, ValueError):
    """Training data is missing, incomplete or not what it should be."""


class DataNotFoundError(DataError):
    """There is no such file or folder of training data."""

    status = NOT_FOUND


class RecordError(DataError):
    """A single record is damaged; the others can be used."""


class CheckpointError(FtmeshError, ValueError):
    """A checkpoint does not fit the run, or would be overwritten by it."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint to go on from."""

    status = NOT_FOUND


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file, or has one that is not as it was written."""


class TrainingError(FtmeshError):
    """A run cannot go on."""


class ClusterError(FtmeshError):
    """The processes of a run do not agree, or one of them is missing, late or has failed."""


class MissingExtraError(FtmeshError, ImportError):
    """A package is not installed that comes with one of ftmesh's extras."""


class TopologyWarning(UserWarning):
    """Something about the devices was decided for the user and is worth knowing."""
