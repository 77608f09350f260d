"""Which way a program is captured, and what is said where no way is open."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.frontends import choose as frontends
from autoshard.frontends.torchax import library as torchax_library


def plan_of_linear(**options):
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    return autoshard.plan(model, torch.zeros(4, 8), mesh="2", **options)


def without(monkeypatch, *packages):
    real = frontends.find_spec
    monkeypatch.setattr(frontends, "find_spec", lambda name: None if name in packages else real(name))


def test_auto_takes_what_is_installed(monkeypatch):
    without(monkeypatch)
    monkeypatch.setattr(frontends, "find_spec", lambda name: object())
    assert frontends.choose() == "torch_xla"
    without(monkeypatch, "torch_xla")
    assert frontends.choose() == "torchax"
    assert frontends.choose("torch_xla") == "torch_xla"


def test_no_way_is_said_with_both_ways(monkeypatch):
    without(monkeypatch, "torch_xla", "torchax")
    with pytest.raises(CaptureError, match=r"autoshard\[xla\].*autoshard\[torchax\].*neither is installed"):
        plan_of_linear()


def test_an_unknown_frontend_is_refused_before_anything_else():
    with pytest.raises(ValueError, match="frontend 'dynamo': there are auto, torch_xla, torchax"):
        plan_of_linear(frontend="dynamo")


@pytest.fixture
def checked(monkeypatch):
    """`check_versions` on versions that a test says."""
    versions = {"torchax": "0.0.13", "jax": torchax_library.JAX, "jaxlib": torchax_library.JAX}
    monkeypatch.setattr(torchax_library, "version_of", versions.get)
    torchax_library.check_versions.cache_clear()
    yield versions
    torchax_library.check_versions.cache_clear()


def test_the_versions_that_it_is_made_for(checked):
    torchax_library.check_versions()


def test_an_old_torch_is_refused(checked, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    with pytest.raises(CaptureError, match=r"needs torch 2\.9 or later, this is 2\.8\.1"):
        plan_of_linear(frontend="torchax")


def test_another_jax_is_refused(checked):
    checked["jaxlib"] = "0.9.0"
    with pytest.raises(CaptureError, match=r"jaxlib 0\.9\.0 is installed: pip install jax=="):
        plan_of_linear(frontend="torchax")


def test_a_missing_torchax_is_refused(checked):
    del checked["torchax"]
    with pytest.raises(CaptureError, match=r"needs torchax, which is not installed: pip install 'autosha"):
        plan_of_linear(frontend="torchax")


@pytest.mark.skipif(frontends.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_torch_xla_asked_for_and_missing():
    with pytest.raises(CaptureError, match=r"torch_xla.*install autoshard\[xla\]"):
        plan_of_linear(frontend="torch_xla")


def test_the_command_line_says_it_in_one_line(tmp_path):
    source = tmp_path / "net.py"
    source.write_text("import torch\ndef net():\n    return torch.nn.Linear(8, 8), torch.zeros(4, 8)\n")
    script = (
        "import sys; from autoshard.frontends import choose; choose.find_spec = lambda name: None; "
        "from autoshard.cli.commands import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", f"{source}:net", "--mesh", "2"], capture_output=True, text=True
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("autoshard: a PyTorch program is captured through torch_xla")
    assert "Traceback" not in done.stderr


def test_ops_that_this_torch_does_not_have_are_absent_while_torchax_is_loaded():
    found = {"__name__": "torchax.ops.some", "aten": torch.ops.aten}
    with torchax_library._absent_ops():
        exec(
            "packet = aten.op_of_another_torch; overload = packet.dim_Dimname; of_known = aten.add.some_Dimname", found
        )
        with pytest.raises(AttributeError):
            _ = torch.ops.aten.op_of_another_torch  # asked by anybody else
    assert repr(found["overload"]).endswith("op_of_another_torch.dim_Dimname")
    assert repr(found["of_known"]).endswith("add.some_Dimname")
    with pytest.raises(AttributeError):
        exec("aten.op_of_another_torch", found)


def recomputed_net(how):
    """Products in a checkpointed block: torch's own checkpoint, a selective one, or one that the planner places."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

        def forward(self, x):
            selective = {
                "context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.autoshard.einsum.default])
            }
            for layer in self.layers:
                if how in ("planned", "plain"):
                    x = layer(x)
                else:
                    x = checkpoint(layer, x, use_reentrant=False, **(selective if how == "selective" else {}))
            return (x**2).mean()

    return Net()


@pytest.mark.parametrize("how", ["checkpoint", "selective", "planned"])
def test_the_second_pass_of_a_checkpoint_has_the_same_switches(how):
    def products(how):
        remat = {"layers.0": "products", "layers.1": "products"} if how == "planned" else None
        program = autoshard.capture(recomputed_net(how), torch.ones(4, 3, 8), optimizer=torch.optim.SGD, remat=remat)
        assert not [op.name for op in program.ops if op.name.startswith(("aten.mm", "aten.addmm"))]
        return sum(op.name.startswith("autoshard.einsum") for op in program.ops)

    assert products(how) - products("plain") == (4 if how == "checkpoint" else 0)
