                self._producers.setdefault(tensor_id(made[0]), producer)


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on an XLA device."""
    return bool(tensor.device.type == "xla")


