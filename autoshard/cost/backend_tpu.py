"""XLA's TPU compiler: what it fuses, combines, and in which order it runs. So far as the GPU's, without combining."""

from __future__ import annotations

from autoshard.cost.backend import Backend


class TpuBackend(Backend):
    """XLA's TPU compiler."""
