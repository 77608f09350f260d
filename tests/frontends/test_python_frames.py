"""What the nodes of a capture keep of the Python stack: nothing, and what collects it is torch's own again after."""

import ctypes
import importlib
from typing import Any

import pytest
import torch

from autoshard.errors import CaptureError
from autoshard.stablehlo.reader import build_graph

hlo_proto, python_frames, torch_xla = (  # `autoshard.capture` is a function where names are imported from
    importlib.import_module(f"autoshard.{name}")
    for name in ("stablehlo.hlo_proto", "frontends.torch_xla.python_frames", "frontends.torch_xla.program")
)


@pytest.fixture
def collector() -> tuple[ctypes.c_void_p, int]:
    found = python_frames._collector()
    if found is None:
        pytest.skip("what collects frames is only known of torch for Linux on x86-64")
    return found


def stacked(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of an HLO module say where its instructions were made, in a capture."""
    found = []

    def noted(module: Any) -> None:
        found.append(module.stack_frame_index.ByteSize())
        hlo_proto.drop_stacks(module)

    monkeypatch.setattr(torch_xla, "drop_stacks", noted)
    with torch.device("meta"):
        program = torch_xla.capture(torch.nn.Linear(4, 4), torch.empty(2, 4))
    makers = {op.aten for op in build_graph(program).ops}
    assert makers.issuperset(range(len(program.ops)))  # labels are there all the same
    return sum(found)


def test_no_node_keeps_the_python_stack(
    collector: tuple[ctypes.c_void_p, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stacked(monkeypatch) == 0
    monkeypatch.setattr(python_frames, "_collector", lambda: None)
    assert stacked(monkeypatch) > 0


def test_torch_collects_frames_again_after_a_capture(collector: tuple[ctypes.c_void_p, int]) -> None:
    word, own = collector
    assert word.value == own
    with python_frames.no_python_frames():
        assert word.value != own
        with python_frames.no_python_frames():  # one capture inside another
            assert word.value != own
        assert word.value != own
    assert word.value == own


def test_torch_collects_frames_again_after_a_capture_that_fails(collector: tuple[ctypes.c_void_p, int]) -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    with torch.device("meta"), pytest.raises(CaptureError):
        torch_xla.capture(Reads(), torch.empty(2, 4))
    assert collector[0].value == collector[1]


def test_another_collector_is_left_alone(collector: tuple[ctypes.c_void_p, int]) -> None:
    word, own = collector
    word.value = ctypes.cast(python_frames._NO_FRAMES, ctypes.c_void_p).value
    try:
        with python_frames.no_python_frames():
            pass
        assert word.value != own
    finally:
        word.value = own
