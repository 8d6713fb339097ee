import pytest

from trainkit.cluster.launchers.slurm import node_names, tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("gpu-a[1-2],login,gpu-b[5]x", ["gpu-a1", "gpu-a2", "login", "gpu-b5x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("", []),
    ],
)
def test_brackets_expand_in_order_and_keep_leading_zeros(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["n[1", "n]1", "n[1-]", "n[a]", "n[]", "n1,,n2", "n[1-9999999]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes: "):
        node_names(text)


def test_counts_repeat() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]


@pytest.mark.parametrize("text", ["", "2x3", "2(x)", "(x2)", "1" * 50])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of tasks per node: "):
        tasks_per_node(text)


@pytest.mark.parametrize("text", ["1(x9999999)", ",".join(["1(x99999)"] * 3)])
def test_more_nodes_than_there_can_be_are_refused_before_they_are_counted_out(text: str) -> None:
    with pytest.raises(ValueError, match="lists more than 100,000 nodes"):
        tasks_per_node(text)


def test_ranges_that_multiply_are_refused_before_they_are_counted_out() -> None:
    with pytest.raises(ValueError, match="lists more than 100,000 nodes"):
        node_names("n[1-9999][1-9999][1-9999]")
