"""The page of a plan: whole, self-contained, small, and saying what the plan says."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoshard.mesh import Mesh
from autoshard.plans.value import CollectiveTotal, ModuleCost, Options, RefineCandidate, Refinement
from autoshard.program import TensorType
from autoshard.show.explanation import Alternative, Explanation
from autoshard.show.page import Drawings, page, tree, undivided
from autoshard.show.report import size
from tests.plans import made as plans

VOID = {"meta", "input", "use", "rect", "br", "wbr"}


class Reader(HTMLParser):
    """Checks that every element is closed, and keeps text and references."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.references, self.ids = [], [], [], []
        self.broken = False  # the word goes on

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.broken = tag == "wbr"
        for name, value in attributes:
            if name in ("href", "src", "xlink:href"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.broken:
            self.text[-1] += data
        else:
            self.text.append(data)
        self.broken = False


def read(plan, *explanations):
    reader = Reader()
    whole = page(plan, explanations)
    reader.feed(whole)
    assert reader.open == []
    return whole, " ".join(" ".join(reader.text).split()), reader


def costs(*modules, compute=0.001, communication=0.0001):
    total = (CollectiveTotal("all-reduce", ("data",), 1, 1000),)
    return tuple(ModuleCost(module, phase, compute, communication, total) for module, phase in modules)


@pytest.fixture
def plan():
    modules = costs(("h.0", "forward"), ("h.1", "forward"), ("h.0", "backward"), ("", "optimizer"))
    return plans.plan(
        plans.program(layers=4), predicted=replace(plans.PREDICTED, modules=modules), options=Options(memory=4 * 10**9)
    )


def test_nothing_is_loaded_from_anywhere(plan):
    whole, _, reader = read(plan)
    assert reader.references
    assert all(reference.startswith("#") for reference in reader.references)
    assert {reference[1:] for reference in reader.references} <= set(reader.ids)
    assert not re.search(r"https?:|@import|url\(", whole)


def test_figures_and_shardings_of_the_plan_are_there(plan):
    _, text, _ = read(plan)
    for said in ("12.3 ms", "11 ms", "34.0 %", "80 % of 4 GB per device", "optimal", "12.35 MB", "[-, model]"):
        assert said in text
    assert "2x4 (data=2, model=4) of tpu-v5e" in text


def test_modules_that_differ_in_their_numbers_alone_are_one(plan):
    (h, optimizer) = tree(plan).children
    assert (h.label, optimizer.label) == ("h", "(optimizer step)")
    # Layers are split by column and by row in turn, and the first one's weight has a copy.
    assert [(child.label, child.members) for child in h.children] == [("0", 1), ("1,3", 2), ("2", 1)]
    first, odd, _ = h.children
    assert set(first.own) == {"forward", "backward"}
    assert [row.name for row in odd.tensors] == ["weight"]
    assert odd.tensors[0].note == "1 optimizer state alike"
    assert odd.device_bytes == 2 * 16 * 16 * 4 // 4


def test_what_modules_take_adds_up(plan):
    root = tree(plan)
    assert root.compute_s == pytest.approx(sum(cost.compute_s for cost in plan.predicted.modules))
    assert root.communication_s == pytest.approx(sum(cost.communication_s for cost in plan.predicted.modules))


def test_a_plan_without_figures_has_a_page_too():
    _, text, _ = read(plans.plan(predicted=None, solver=None))
    assert "Where the time goes" not in text
    assert "h.0" in text.replace(" ", "") or "0" in text


def test_names_are_escaped():
    made = plans.plan()
    odd = replace(made, inputs={"<script>alert(1)</script>": made.inputs["x"]})
    whole, text, _ = read(odd)
    assert "<script>alert" not in whole
    assert "<script>alert(1)</script>" in text


def test_ops_without_a_rule_are_listed_with_the_reason():
    _, text, _ = read(plans.plan(replicated=plans.REPLICATED))
    assert "sort 6 6 us h.* no rule" in text
    assert "fft 1 2 us filter no rule" in text


def test_what_is_not_split_is_listed_with_what_it_costs_and_why():
    made = plans.plan()
    weights = [row for row in undivided(made) if "weight" in row.name]
    assert {row.idle for row in weights} == {("data",)}
    # 16 x 16 floats over 4 devices are 256 bytes on each; over 8 they would be 128.
    assert {(row.device_bytes, row.saved_bytes) for row in weights} == {(256, 128)}
    assert {row.why for row in weights} == {"no plan that splits it further takes less time, in the cost model"}
    hinted = plans.plan(options=Options(hints={"h.0.weight": ((), ("model",))}))
    assert next(row for row in undivided(hinted) if row.name == "h.0.weight").why == "a hint asked for it"
    by_hand = plans.plan(solver=None)
    assert "whoever wrote the plan" in undivided(by_hand)[0].why
    odd = plans.plan(plans.program(width=15), mesh=Mesh((2, 4), device="cpu"))
    assert "none of its dims is a multiple" in next(row for row in undivided(odd) if row.name == "scale").why


def test_explanations_are_tables():
    made = plans.plan()
    spec, other = made.parameters["h.0.weight"].spec, (("data",), ("model",))
    found = Explanation(
        "h.0.weight", TensorType((16, 16), "f32"), spec,
        (Alternative(spec, 0.0123, 0.01, 0.0023, 0.011, 100),
         Alternative(other, 0.0223, 0.01, 0.0123, 0.02, 90, ("x",)),
         Alternative(((), ()), error="needs at least 5 GB per device")), made.mesh,
    )  # fmt: skip
    _, text, _ = read(made, found)
    assert "+9 ms (+82 %)" in text
    assert "needs at least 5 GB per device" in text
    row = next(row for row in undivided(made, [found]) if row.name == "h.0.weight")
    assert row.why == "the best plan that splits it so, [data, model], takes 9 ms more"


def test_lines_between_many_parts_leave_the_parts_to_be_seen():
    drawings = Drawings(Mesh((64, 2)))
    few, many = (drawings.symbol(spec) for spec in (((), ("model",)), (("data",), ())))
    parts = dict(re.findall(r'<symbol id="(\w+)".*?<g stroke-width="([\d.]+)">', drawings.definitions()))
    assert float(parts[few]) == 1
    assert float(parts[many]) < 0.2 * 48 / 64


def test_numbers_too_small_to_read_are_left_out():
    for count, shown in ((4, 4), (32, 0)):
        drawings = Drawings(Mesh((count, 2)))
        drawings.symbol((("data",), ()))
        assert drawings.definitions().count("<text") == shown


def test_what_a_compiler_said_of_the_memory_is_on_the_page():
    said = {"verdict": "fits", "target": "h100:8", "compiler": "xla 1", "compiled_bytes": 10**9, "compiles": 1}
    _, text, _ = read(replace(plans.plan(), info={"confirmed": said}))
    assert "as compiled 1 GB per device: fits (xla 1 for h100:8, 1 plan compiled in 0 s)" in text


def test_what_a_plan_was_refined_from_is_a_table():
    rows = (
        RefineCandidate("optimum", 0.010, 0.009, 0.0125, 0.0115, 2_000_000),
        RefineCandidate("another h.*.weight", 0.011, 0.0105, 0.012, 0.0111, 1_000_000),
        RefineCandidate("fsdp", 0.013, 0.012, note="does not compile"),
    )
    _, before, _ = read(plans.plan())
    assert "Refined" not in before
    _, text, _ = read(replace(plans.plan(), refined=Refinement("h100:8", "another h.*.weight", rows)))
    assert "Refined for h100:8" in text
    assert "optimum 10 ms 9 ms 12.5 ms 11.5 ms 2 MB another h.*.weight 11 ms 10.5 ms 12 ms 11.1 ms 1 MB taken" in text
    assert "fsdp 13 ms 12 ms – – – does not compile" in text


def test_the_memory_bar_is_that_of_the_limit_where_it_is_near():
    peak = plans.plan().predicted.peak_memory_bytes
    for limit, said in ((2 * peak, "The bar's length is the limit"), (100 * peak, "The bar's length is the peak")):
        _, text, _ = read(plans.plan(options=Options(memory=limit)))
        assert said in text


def test_a_model_of_many_layers_that_are_all_alike_stays_small():
    whole, _, _ = read(plans.plan(plans.program(layers=200)))
    assert len(whole) < 60_000
    assert size(len(whole.encode())).endswith("kB")
