"""The names of the package are written out, for type checkers, and each of them exists."""

import ast
from pathlib import Path

import arimage


def test_the_names_of_the_package_agree_in_all_three_places():
    tree = ast.parse(Path(arimage.__file__).read_text())
    literal = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body for alias in node.names}
    assert set(literal) == {*arimage._EXPORTS, "__version__"} == typed | {"__version__"}
    assert all(getattr(arimage, name) is not None for name in literal)
