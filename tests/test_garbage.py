"""What a process has as it begins to serve is never looked through again."""

import gc

from pipeline import garbage


def test_what_was_there_before_is_left_alone_and_what_comes_after_is_collected() -> None:
    lasting: list[list[object]] = [[]]
    try:
        garbage.settle()
        assert gc.get_freeze_count() > 1000
        assert not any(thing is lasting for thing in gc.get_objects()), "the collector does not see it"
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
