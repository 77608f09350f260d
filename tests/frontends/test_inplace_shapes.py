"""Shapes of optimizers' in-place steps, said at once (`frontends/torch_xla/inplace_shapes.py`)."""

import sys

import pytest
import torch

from autoshard.frontends.torch_xla.inplace_shapes import quick_inplace_shapes

STEPS = {
    "lerp by a number": lambda x, y: x.lerp_(y, 0.1),
    "lerp by a tensor": lambda x, y: x.lerp_(y, y),
    "addcmul": lambda x, y: x.addcmul_(y, y, value=0.5),
    "addcdiv": lambda x, y: x.addcdiv_(y, y, value=-0.5),
}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
class TestInplaceShapes:
    def test_what_is_alike_gives_back_what_is_written(self, step):
        x = meta(3, 4)
        with quick_inplace_shapes():
            assert step(x, meta(3, 4)) is x

    def test_what_broadcasts_is_asked_of_torch(self, step):
        x = meta(3, 4)
        with quick_inplace_shapes():
            assert step(x, meta(4)) is x

    def test_wrong_shapes_are_refused_as_before(self, step):
        with pytest.raises(RuntimeError) as before:
            step(meta(4), meta(3, 4))
        with quick_inplace_shapes(), pytest.raises(RuntimeError) as within:
            step(meta(4), meta(3, 4))
        assert str(within.value) == str(before.value)

    def test_nothing_is_left_behind(self, step, monkeypatch):
        asked = []
        module = sys.modules[quick_inplace_shapes.__module__]
        monkeypatch.setattr(module, "_alike", lambda *each: asked.append(each) or True)
        with quick_inplace_shapes():
            step(meta(3), meta(3))
        assert len(asked) == 1
        step(meta(3), meta(3))
        assert len(asked) == 1
