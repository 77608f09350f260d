"""XLA's GPU compiler finds no tiles for some of its own kernels; the program is then compiled without those."""

from types import SimpleNamespace

import pytest

jax = pytest.importorskip("jax")

from autoshard.verify import worker  # noqa: E402

TILES = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.326 = f32[1568,384]{0,1} dot(...)"


class Client:
    """A compiler that refuses every program unless Triton's matrix products are switched off."""

    def __init__(self, message):
        self.message, self.asked = message, []

    def compile(self, module, devices, options):
        self.asked.append(dict(options.env_option_overrides))
        if self.asked[-1].get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(self.message)
        return module


def test_a_product_without_tiles_is_compiled_as_a_library_call():
    client, options = Client(TILES), SimpleNamespace(env_option_overrides=[("other", 1)])
    assert worker._compiled(client, "module", (), options) == "module"
    assert client.asked == [{"other": 1}, {"other": 1, "xla_gpu_enable_triton_gemm": False}]


def test_other_errors_are_told():
    client = Client("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        worker._compiled(client, "module", (), SimpleNamespace(env_option_overrides=[]))
    assert len(client.asked) == 1
