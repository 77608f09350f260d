"""What autoshard raises when it is given something it cannot use: one line for a person, the details in the text."""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose."""


class CaptureError(AutoshardError, ValueError):
    """A program that cannot be captured: what, in which module, and what to do."""


class SourceError(AutoshardError, ValueError):
    """A SOURCE (`hf:gpt2`, `file.py:function`) that names nothing usable."""


class LoweringError(AutoshardError, RuntimeError):
    """A plan that cannot be carried out here: the runtime, the model or the step is not what it was made for."""


class ManualPlanError(AutoshardError, ValueError):
    """A plan that people do not make by hand for programs of this kind: why."""


class FileError(AutoshardError, ValueError):
    """A file that cannot be written: which, and why."""


class AutoShardingError(AutoshardError, RuntimeError):
    """What the automatic mode was asked for cannot be: before anything of the loop has run."""


class AutoShardingWarning(UserWarning):
    """What of a training loop the automatic mode leaves to XLA's propagation: what, where, and why; once per loop."""
