"""Every error this project raises on purpose, under one base class."""


class ChakraCaptureError(Exception):
    """Base of all errors: the message says what is wrong, what was expected, what to do next."""


class SettingsError(ChakraCaptureError, ValueError):
    """A setting is wrong; raised before training starts."""


class MissingDependencyError(ChakraCaptureError, ImportError):
    """An optional package is absent; the message holds the exact ``pip install`` line."""


class RecordingError(ChakraCaptureError, RuntimeError):
    """Recording cannot start or go on in this process; training is not affected."""


class InitError(ChakraCaptureError, RuntimeError):
    """``init`` was not called, or with other settings, or by another integration; or a thing is wrapped twice."""


class ScriptError(ChakraCaptureError, ValueError):
    """What is to be run is no Python script, module or program."""


class TraceFileError(ChakraCaptureError, ValueError):
    """A trace file or folder cannot be used: missing, damaged beyond repair, or not a trace."""


class PairingError(ChakraCaptureError, ValueError):
    """Host and device trace are not of the same process, rank and run."""


class ClusterError(ChakraCaptureError, RuntimeError):
    """A cluster cannot merge: nothing answers, or its workers have another version or other folders."""
