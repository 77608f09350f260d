import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autoshard.graph.orders import post_order

needs = st.lists(st.lists(st.integers(0, 100), max_size=5), min_size=1, max_size=20)


@given(needs)
def test_post_order_is_that_of_networkx(numbers: list[list[int]]):
    before = [[each % number for each in several] if number else [] for number, several in enumerate(numbers)]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(before)))
    graph.add_edges_from((number, other) for number, several in enumerate(before) for other in several)
    last = len(before) - 1
    assert post_order([last], before.__getitem__) == list(nx.dfs_postorder_nodes(graph, last))
    assert sorted(post_order(range(len(before)), before.__getitem__)) == list(range(len(before)))
