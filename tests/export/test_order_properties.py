"""Chains, crossed groups, circles and longest paths of small graphs, against reachability worked out the plain way."""

import json

import networkx as nx
from commands import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.et_writer import ALL_REDUCE, Run, coll, comp, et


@st.composite
def graphs(draw):
    """Nodes 1 to n with dependencies on any of them; a third are collectives of group 1 or 2."""
    number = draw(st.integers(1, 9))
    nodes = []
    for one in range(1, number + 1):
        # Mostly on earlier ones; on later ones, and itself, so rarely that graphs without circles remain.
        most = number if draw(st.integers(0, 9)) == 0 else one - 1
        data = tuple(draw(st.sets(st.integers(1, most), max_size=3))) if most else ()
        group = draw(st.sampled_from(["", "", "1", "2"]))
        dur = draw(st.integers(0, 5))
        if group:
            nodes.append(coll(one, data, ALL_REDUCE, 8, group, start=0, dur=dur))
        else:
            nodes.append(comp(one, data, start=0, dur=dur))
    return nodes


def plain(nodes):
    """The graph from what is waited for to what waits."""
    graph = nx.DiGraph()
    graph.add_nodes_from(one.id for one in nodes)
    graph.add_edges_from((before, one.id) for one in nodes for before in one.data)
    return graph


def group_of(node):
    return next((value for name, _, value in node.attrs if name == "pg_name"), None)


def issue_order(nodes):
    return [*nx.lexicographical_topological_sort(plain(nodes))]


def findings(folder):
    said = json.loads(run("validate", folder, "--json").out)
    return {one["check"]: [(place["rank"], place["node"]) for place in one["places"]] for one in said["findings"]}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(graphs(), min_size=2, max_size=2))
def test_order_is_what_reachability_says(tmp_path, ranks):
    found = findings(Run({0: ranks[0], 1: ranks[1]}).write(tmp_path))
    unchained, meetings, is_acyclic = set(), nx.DiGraph(), True
    for rank, nodes in enumerate(ranks):
        graph = plain(nodes)
        if not nx.is_directed_acyclic_graph(graph):
            is_acyclic = False
            continue
        by_id, count, last, at = {one.id: one for one in nodes}, {}, {}, {}
        for one in issue_order(nodes):
            group = group_of(by_id[one])
            if group is None:
                continue
            if group in last and not nx.has_path(graph, last[group], one):
                unchained.add((rank, one))
            last[group] = one
            count[group] = count.get(group, 0) + 1
            at[one] = (group, count[group])
        meetings.add_edges_from(
            (at[left], at[right]) for left in at for right in at if left != right and nx.has_path(graph, left, right)
        )
    circles = {rank for rank, nodes in enumerate(ranks) if has_circle(nodes)}
    assert {rank for rank, _ in found.get("V5-cycle", [])} == circles
    if is_acyclic:
        assert set(found.get("V16-unchained", [])) == unchained
        # In a group without a chain a later number may stand for an earlier one: only chains say who waits for whom.
        if not unchained:
            assert ("V17-crossed" in found) == (not nx.is_directed_acyclic_graph(meetings))


def has_circle(nodes):
    graph = plain(nodes)
    graph.remove_edges_from([*nx.selfloop_edges(graph)])  # V4
    return not nx.is_directed_acyclic_graph(graph)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_the_longest_path_is_the_longest_of_all_paths(tmp_path, nodes):
    (tmp_path / "a.et").write_bytes(et(nodes))
    said = json.loads(run("inspect", tmp_path / "a.et", "--json").out)
    graph = plain(nodes)
    graph.remove_edges_from([*nx.selfloop_edges(graph)])
    on_circles = {one for part in nx.strongly_connected_components(graph) if len(part) > 1 for one in part}
    never = on_circles | {one for start in on_circles for one in nx.descendants(graph, start)}
    assert said["num_never_run"] == len(never)
    graph.remove_nodes_from(never)
    durations = {one.id: one.dur for one in nodes}
    ends = {}
    for one in nx.topological_sort(graph):
        ends[one] = durations[one] + max((ends[before] for before in graph.predecessors(one)), default=0)
    assert said["path_us"] == max(ends.values(), default=0)
