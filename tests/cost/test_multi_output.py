"""Merging kernels with several results: against reachability worked out anew after every merge."""

import random
import time
from unittest.mock import patch

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost import multi_output
from autoshard.cost.kernels import Kernel
from autoshard.cost.multi_output import merged_outputs


def kernels(seed: int) -> list[Kernel]:
    """A random program: kernel i makes array i and reads some of those before it."""
    draw = random.Random(seed)
    count = draw.randint(2, 90)
    read = [sorted(draw.sample(range(i), min(i, draw.randint(0, 3)))) for i in range(count)]
    return [Kernel((i,), tuple(before), (i,), "loop", i) for i, before in enumerate(read)]


def reference(program: list[Kernel], alike) -> set[frozenset[int]]:
    """The same merges in the same order, on a graph of the merged kernels."""
    into = list(range(len(program)))
    users: dict[int, list[int]] = {}
    for number, kernel in enumerate(program):
        for array in (*kernel.writes, *kernel.reads):
            users.setdefault(array, []).append(number)

    def graph() -> nx.DiGraph:
        edges = [(into[array], into[i]) for i, kernel in enumerate(program) for array in kernel.reads]
        return nx.DiGraph([(a, b) for a, b in edges if a != b])

    for group in users.values():
        for place, later in enumerate(group[1:], 1):
            for earlier in group[:place]:
                one, other = into[earlier], into[later]
                if one == other or not alike(program[one], program[other]):
                    continue
                found = graph()
                found.add_nodes_from((one, other))
                if found.has_edge(one, other):
                    found.remove_edge(one, other)
                if not nx.has_path(found, one, other) and not nx.has_path(found, other, one):
                    into = [one if number == other else number for number in into]
                    break
    return {frozenset(i for i, to in enumerate(into) if to == kept) for kept in set(into)}


@given(st.integers(0, 10**6), st.sampled_from((0, 3, 64)))
def test_what_merges_is_what_a_graph_allows(seed, few):
    program = kernels(seed)

    def alike(one: Kernel, other: Kernel) -> bool:
        return (one.place * 7 + other.place) % 3 > 0

    def key(kernel: Kernel) -> int | None:
        return (0, 0, 1, None)[kernel.place % 4]

    def both(one: Kernel, other: Kernel) -> bool:
        return key(one) is not None and key(one) == key(other) and alike(one, other)

    with patch.object(multi_output, "FEW", few):  # whoever waits is found among readers, or by all bits
        merged = merged_outputs(program, key, lambda array: True, alike)
    assert {frozenset(kernel.steps) for kernel in merged} == reference(program, both)
    assert sorted(step for kernel in merged for step in kernel.steps) == list(range(len(program)))


def test_thousands_of_kernels_that_read_one_array_merge_in_linear_time():
    """Updates of 5,000 parameters that share a learning rate: each merge looked at all that was merged before."""
    kernels = [Kernel((n,), (20_000, 30_000 + n), (n,), "loop", n) for n in range(6000)]
    began = time.process_time()
    (merged,) = merged_outputs(kernels, lambda kernel: 0, lambda array: True)
    assert len(merged.steps) == 6000
    assert time.process_time() - began < 5.0  # it took a minute
