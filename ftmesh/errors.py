"""The errors that ftmesh raises.

A message says what was given, what the rule is, and what to do instead.
"""

# Exit statuses, which `ftmesh --help` lists. Engines decide by them whether to start again.
#   0                done
#   2, 65, 66, 69    your mistake, or your data: the same again would fail again (sysexits.h)
#   75               restart me (EX_TEMPFAIL)
#   76               a peer was lost, or is missing
#   77               out of hosts: too few are left
#   128 + n          ended by signal n
USAGE, VERIFICATION_FAILED, NOT_FOUND, UNAVAILABLE = 2, 65, 66, 69
RESTART, PEER_LOST, OUT_OF_HOSTS = 75, 76, 77


class FtmeshError(Exception):
    """The base class of all ftmesh errors."""

    status = UNAVAILABLE


class ArgumentError(FtmeshError, ValueError):
    """An argument has the wrong form or value."""

    status = USAGE


class TopologyError(FtmeshError, ValueError):
    """The mesh, the failed blocks or the devices do not form a topology."""

    status = USAGE


class RoutingError(FtmeshError, ValueError):
    """There is no route, or a set of routes could deadlock."""


class ScheduleError(FtmeshError, ValueError):
    """The transfers given do not form valid rounds."""


class PlanError(FtmeshError, ValueError):
    """An algorithm does not support this topology; the message names one that does."""


class VerificationError(FtmeshError):
    """A schedule fails its proof."""

    status = VERIFICATION_FAILED


class ScheduleFileError(FtmeshError, ValueError):
    """A file is not a readable ftmesh schedule."""


class ScheduleNotFoundError(ScheduleFileError):
    """The schedule file does not exist."""

    status = NOT_FOUND


class UnreadableError(FtmeshError):
    """JAX cannot print a compiled program."""


class CollectiveError(FtmeshError, ValueError):
    """A collective's axis or operands do not fit its plan."""


class DataError(FtmeshError, ValueError):
    """Training data is missing, incomplete or malformed."""


class DataNotFoundError(DataError):
    """A file or folder of training data does not exist."""

    status = NOT_FOUND


class RecordError(DataError):
    """One record is damaged; the others can be used."""


class CheckpointError(FtmeshError, ValueError):
    """A checkpoint cannot be read or written, or is of another run."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint to resume from."""

    status = NOT_FOUND


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file, or a file has changed since it was written."""


class TrainingError(FtmeshError):
    """Training cannot continue."""


class ClusterError(FtmeshError):
    """Processes disagree, or one of them is missing, late or has failed."""


class PeerLostError(ClusterError):
    """A process of the run is gone, or did not come in time; a restart of all may cure it."""

    status = PEER_LOST


class MissingExtraError(FtmeshError, ImportError):
    """A package that one of ftmesh's extras installs is missing."""


class TopologyWarning(UserWarning):
    """ftmesh has made an assumption about the devices."""


class BatchSizeWarning(UserWarning):
    """A batch has another size than was asked for."""
