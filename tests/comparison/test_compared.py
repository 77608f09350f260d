"""Plans beside one another: in Python, on the command line, as text, JSON and figures."""

import json
from dataclasses import replace

import pytest

import autoshard
from autoshard.comparison.compared import Comparison, Row
from autoshard.errors import LoweringError
from autoshard.manual import PLANS
from autoshard.mesh import Mesh
from autoshard.planning import written
from autoshard.plans.value import CollectiveTotal, MeshTried, PlanMismatchError, Predicted
from autoshard.strategies.guard import UncompilableError
from tests.plans import made

torch = pytest.importorskip("torch")


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OTHERS = {"context", "sequence", "torchtitan", "vocab", "hf-tp", "expert", "embedding", "spatial"}
"""Plans that have no form for two linear layers."""
ROWS = ["auto", *(name for name in PLANS if name not in OTHERS)]
INPUTS = (torch.zeros(32, 64), torch.zeros(32, 64))


@pytest.fixture(scope="module")
def compared():
    return autoshard.compare(
        network(), INPUTS, mesh="2x2", loss_fn=torch.nn.functional.mse_loss, optimizer=sgd, target="cpu"
    )


def test_auto_is_held_against_every_plan_that_fits_the_program(compared):
    assert [row.name for row in compared.rows] == ROWS
    assert compared.left_out == {}
    assert compared["auto"].plan.solver.status == "optimal"
    assert compared["dp"].plan.parameters["0.weight"].spec == ((), ())


def test_a_row_has_the_figures_of_its_plan_and_of_the_compiled_program(compared):
    for row in compared.rows:
        predicted, compiled = row.predicted, row.compiled
        assert predicted.step_time_s == pytest.approx(predicted.compute_s + predicted.communication_s)
        assert compiled.step_time_s == pytest.approx(compiled.compute_s + compiled.communication_s)
        # Useful work is the same, however long a step takes.
        assert compiled.mfu * compiled.step_time_s == pytest.approx(predicted.mfu * predicted.step_time_s)
        assert 0 <= row.fidelity < 0.1
    (reduced,) = compared["dp"].compiled.collectives
    assert (reduced.kind, reduced.axes) == ("all-reduce", ("data", "model"))
    gradients = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert gradients <= reduced.bytes < 1.01 * gradients  # and the loss


def test_the_ratio_is_to_the_best_other_plan_that_fits():
    def row(name, seconds, memory):
        figures = Predicted(seconds, seconds, 0.0, seconds, 0.5, (), memory)
        return Row(name, made.plan(predicted=figures))

    rows = (row("auto", 2.0, 50), row("dp", 1.0, 200), row("fsdp", 4.0, 60))
    assert Comparison(made.MESH, 100, rows).ratio() == 0.5
    assert Comparison(made.MESH, None, rows).ratio() == 2.0
    assert Comparison(made.MESH, 100, rows[1:]).ratio() is None
    assert Comparison(made.MESH, 100, rows[:2]).ratio() is None
    text = str(Comparison(made.MESH, 100, rows, {"expert": "there are no experts"}))
    assert "200 B    200% !" in text
    assert text.endswith("expert: left out; there are no experts")


def test_as_plain_values(compared):
    said = json.loads(json.dumps(compared.to_dict()))
    assert said["target"] == "cpu"
    assert [each["name"] for each in said["plans"]] == ROWS
    auto = said["plans"][0]
    assert auto["predicted"]["step_time_s"] == compared["auto"].predicted.step_time_s
    assert set(auto["compiled"]) == set(auto["predicted"])
    assert said["auto_over_best"]["predicted"] == compared.ratio() < 1.001


def test_the_text_has_a_line_per_plan_and_the_bytes_of_every_kind(compared):
    text = str(compared)
    assert text.count("\n  megatron ") == 4
    assert "Compiled for cpu" in text
    assert "all-reduce" in text


def test_a_plan_of_ones_own_is_compared_too(compared):
    again = autoshard.compare(
        network(), INPUTS, mesh="2x2", loss_fn=torch.nn.functional.mse_loss, optimizer=sgd, plans=["dp"],
        others={"mine": compared["auto"].plan},
    )  # fmt: skip
    assert [row.name for row in again.rows] == ["dp", "mine"]
    assert again["mine"].predicted == compared["auto"].predicted
    with pytest.raises(PlanMismatchError, match=r"for the mesh 2x2.*not one for 4x1"):
        autoshard.compare(
            network(), INPUTS, mesh="4x1", loss_fn=torch.nn.functional.mse_loss, optimizer=sgd, plans=["dp"],
            others={"mine": compared["auto"].plan},
        )  # fmt: skip


def test_what_nobody_plans_by_hand_is_left_out_with_the_reason():
    found = autoshard.compare(torch.nn.ReLU(), torch.zeros(8, 8), mesh="2", plans=["dp", "megatron"])
    assert [row.name for row in found.rows] == ["dp"]
    assert "pairs of linear layers" in found.left_out["megatron"]


def test_a_plan_by_hand_that_would_not_compile_is_left_out_with_the_reason(monkeypatch):
    def aborts(*_: object) -> None:
        raise UncompilableError("the compiler would abort on scatter op 7")

    monkeypatch.setattr(written, "check_compiles", aborts)
    found = autoshard.compare(torch.nn.ReLU(), torch.zeros(8, 8), mesh="2", plans=["auto", "dp"])
    assert [row.name for row in found.rows] == ["auto"]
    assert found.left_out == {"dp": "the compiler would abort on scatter op 7"}


def test_plans_of_a_step_with_micro_batches_that_recomputes_and_clips():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(network() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    def by_hand(**step):
        given = {"mesh": "2x2", "loss_fn": torch.nn.functional.mse_loss, "optimizer": sgd, "plans": ["dp"]}
        return autoshard.compare(Net(), INPUTS, **given, **step)["dp"]

    step = {"remat": "full", "micro_batches": 3, "clip_grad_norm": 1.0}
    found = by_hand(**step)
    assert found.plan.micro_batches == 3
    assert {"micro_batches:3", "clip_grad_norm:1.0", "remat:all=blocks.0-1"} <= set(found.plan.program.switches)
    ((summed,), (once,)) = found.predicted.collectives, by_hand().predicted.collectives
    assert (summed.bytes, summed.count) == (3 * once.bytes, 3 * once.count)  # gradients, in each micro-step
    with pytest.raises(LoweringError, match="export it with micro_batches=2"):  # before anything is planned
        by_hand(**step, target="cpu")
    with pytest.raises(ValueError, match="remat is as-is"):
        by_hand(remat="some")


def test_an_unknown_plan_is_refused_before_anything_is_captured():
    with pytest.raises(ValueError, match=r"no plan is called 'zero'; there are auto, dp, .*fsdp, "):
        autoshard.compare(network(), INPUTS, mesh="2x2", plans=["zero"])
    with pytest.raises(ValueError, match="plans are compared on one mesh"):
        autoshard.compare(network(), INPUTS)


def test_the_device_is_the_targets_unless_it_is_given():
    from autoshard.comparison.compared import comparison_mesh

    assert comparison_mesh("2x4", None, "h100:8").device == "h100:8"
    assert comparison_mesh((2, 4), "tpu-v5e", None).device == "tpu-v5e"
    assert comparison_mesh("2x4", None, None, "a,b") == Mesh((2, 4), ("a", "b"))
    with pytest.raises(ValueError, match="has 8 devices"):
        comparison_mesh("2x2", None, "h100:8")


def test_figures_are_drawn(compared, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra notebooks")
    from autoshard.show import plots

    figure = compared.plot(compiled=True)
    times, mfu, moved, memory = figure.axes
    heights = [patch.get_height() for patch in times.patches]
    compiled = [row.compiled for row in compared.rows]
    assert heights == pytest.approx(
        [1e3 * each.compute_s for each in compiled] + [1e3 * each.communication_s for each in compiled]
    )
    assert len(mfu.patches) == len(memory.patches) == len(ROWS)
    assert sum(patch.get_height() for patch in moved.patches) == pytest.approx(
        sum(total.bytes for each in compiled for total in each.collectives) / 1e9
    )
    plots.save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="png, svg, pdf"):
        plots.save(figure, tmp_path / "figure.txt")


def test_sweeps_and_shardings_are_drawn(compared):
    pytest.importorskip("matplotlib", reason="the extra notebooks")
    from autoshard.show import plots

    sweep = plots.plot_sweep({8: compared, 16: compared}, "batch")
    assert [text.get_text() for text in sweep.axes[0].get_legend().get_texts()] == ROWS
    drawn = plots.plot_shardings(compared["fsdp"].plan, ["0.weight", "2.bias"])
    assert [len(axes.patches) for axes in drawn.axes] == [4, 4]
    with pytest.raises(KeyError, match=r"called '9\.weight'"):
        plots.plot_shardings(compared["fsdp"].plan, ["9.weight"])


def test_bytes_are_summed_over_axes():
    from autoshard.show.report import bytes_by_kind

    totals = tuple(CollectiveTotal("all-gather", (axis,), 1, 5) for axis in ("data", "model"))
    assert bytes_by_kind(Predicted(1.0, 1.0, 0.0, 1.0, 0.1, totals, 1)) == {"all-gather": 10}


def test_mesh_shapes_are_drawn_with_their_bounds():
    pytest.importorskip("matplotlib")
    from autoshard.show import plots

    with pytest.raises(ValueError, match="no mesh shapes were tried"):
        plots.plot_search(made.plan())
    shape = made.plan().mesh.shape
    tried = (
        MeshTried((8,), "planned", 0.020, 0.019, 0.018, 5),
        MeshTried(shape, "planned", 0.010, 0.010, 0.010, 5),
        MeshTried((2, 2, 2), "pruned", bound=0.012, note="no plan is better"),
        MeshTried((4, 2), "same", note="as 2x4"),
    )
    (axes,) = plots.plot_search(replace(made.plan(), search=tried)).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["×".join(map(str, shape)), "8", "2×2×2"]
    assert [bar.get_height() for bar in axes.patches] == [10, 20, 0]
    assert [bar.get_alpha() for bar in axes.patches] == [1, 0.5, 0.5]
    assert list(axes.lines[0].get_ydata()) == [10, 18, 12]


def test_the_compilers_clock_stands_beside():
    pytest.importorskip("libtpu")
    found = autoshard.compare(
        network(),
        INPUTS,
        mesh="2x4",
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=sgd,
        target="tpu-v5e:2x4",
        plans=["auto", "dp"],
        cycles=True,
    )
    for row, said in zip(found.rows, found.to_dict()["plans"], strict=True):
        assert row.error == ""
        assert 0 < row.clock_s == said["compiler_step_time_s"]
    assert "step by libtpu" in str(found)


def test_the_compilers_clock_needs_a_tpu():
    loss_fn = torch.nn.functional.mse_loss
    for target, said in (("cpu", "only libtpu estimates cycles"), (None, "cycles=True needs a target")):
        with pytest.raises(ValueError, match=said):
            autoshard.compare(network(), INPUTS, loss_fn=loss_fn, mesh="2x2", target=target, plans=["dp"], cycles=True)


@pytest.mark.parametrize(("slower", "marked"), [(1.01, ["auto", "dp"]), (2.0, [])])
def test_a_tie_is_marked_where_there_is_another_plan_in_it(slower: float, marked: list[str]) -> None:
    """The fastest plan was marked alone, though the next one took 2.6 times as long."""
    mesh = Mesh((2, 2), ("data", "model"), device="h100:4")
    found = autoshard.compare(network(), INPUTS, mesh=mesh, loss_fn=torch.nn.functional.mse_loss, optimizer=sgd)
    first = found["auto"]
    times = {
        name: replace(first.predicted, overlapped_s=1e-3 * factor) for name, factor in (("dp", slower), ("auto", 1.0))
    }
    rows = [replace(row, plan=replace(row.plan, predicted=times[row.name])) for row in found.rows if row.name in times]
    text = str(replace(found, rows=tuple(rows)))
    assert [name for name in ("auto", "dp") if f"{name} ~" in text] == marked
