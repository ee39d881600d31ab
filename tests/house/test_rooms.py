"""The picture of the rooms is that of the imports, with the numbers of docs/code.md."""
import pytest
import rooms


def test_the_picture_is_drawn_from_the_imports_as_they_are():
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.drawn(), "run python tests/house/rooms.py"


def test_lines_that_follow_from_others_are_left_out_and_circles_are_refused():
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert rooms.direct(edges) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert rooms.levels(edges) == [["c"], ["b"], ["a"]]
    with pytest.raises(ValueError, match="a -> b -> a"):
        rooms.levels({"a": {"b"}, "b": {"a"}})
    assert rooms.room_of("meshtrain.data.batches.order", {"data", "data/batches"}) == "data/batches"
    assert rooms.room_of("meshtrain.database", {"data"}) == ""
