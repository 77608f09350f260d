"""Base classes of autoshard's errors: one line for the user, details in the text."""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of every deliberate error of autoshard."""


class CaptureError(AutoshardError, ValueError):
    """A program that cannot be captured: what, in which module, and what to do."""


class SourceError(AutoshardError, ValueError):
    """A SOURCE (`hf:gpt2`, `file.py:function`) that cannot be resolved."""


class LoweringError(AutoshardError, RuntimeError):
    """A plan that cannot be lowered here: it was made for another runtime, model or step."""


class ManualPlanError(AutoshardError, ValueError):
    """A plan by hand that does not apply to the program: why."""


class FileError(AutoshardError, ValueError):
    """A file that cannot be written: which, and why."""


class AutoShardingError(AutoshardError, RuntimeError):
    """An invalid request to the automatic mode, before anything of the loop has run."""


class AutoShardingWarning(UserWarning):
    """What the automatic mode leaves to XLA's propagation: the part of the loop, where, and why; once per loop."""
