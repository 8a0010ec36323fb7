"""What is remembered belongs to the object it was made from, and to no other."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
from absorbed_mla.core_attention.by_identity import cached_by_identity


class Subject:
    """Equal to all others, as two packs of equal lengths are."""

    def __eq__(self, other):
        return isinstance(other, Subject)

    def __hash__(self):
        raise AssertionError("hashing thousands of numbers is what the cache is there to avoid")


class Counted:
    """A cached function that counts its calls."""

    def __init__(self, maxsize: int) -> None:
        self.calls = 0
        self.cached = cached_by_identity(maxsize=maxsize)(self.compute)

    def compute(self, subject, *others):
        self.calls += 1
        return (id(subject), *others)


def test_is_computed_once():
    function, subject = Counted(4), Subject()
    first = function.cached(subject, 3)
    assert function.cached(subject, 3) is first and first == (id(subject), 3)
    assert function.calls == 1


def test_equal_objects_are_different():
    function, subjects = Counted(4), [Subject(), Subject()]
    assert subjects[0] == subjects[1]
    assert [function.cached(s) for s in subjects] == [(id(s),) for s in subjects]
    assert function.calls == 2


def test_other_arguments_are_compared_by_value():
    function, subject = Counted(8), Subject()
    for others in ((), (1,), (2,), (1, 2), (2, 1)):
        assert function.cached(subject, *others) == (id(subject), *others)
    assert function.calls == 5
    assert function.cached(subject, int("1"), int("2")) == (id(subject), 1, 2)
    assert function.calls == 5


def test_nothing_to_say_is_remembered_too():
    calls = []
    cached = cached_by_identity(maxsize=2)(calls.append)
    subject = Subject()
    assert cached(subject) is None and cached(subject) is None
    assert len(calls) == 1


def test_the_one_used_longest_ago_goes():
    function, (a, b, c) = Counted(2), (Subject(), Subject(), Subject())
    for subject in (a, b, a, c, a):
        function.cached(subject)
    assert function.calls == 3
    function.cached(b)
    assert function.calls == 4


def test_an_id_is_not_given_to_another_object_while_it_is_known():
    """Otherwise a new pack would be attended to by the boundaries of one that is gone."""
    function, subject = Counted(1), Subject()
    alive = weakref.ref(subject)
    function.cached(subject)
    del subject
    gc.collect()
    assert alive() is not None
    function.cached(Subject())
    gc.collect()
    assert alive() is None


def test_a_failure_is_not_remembered():
    attempts = []

    @cached_by_identity(maxsize=2)
    def fails_once(subject):
        attempts.append(subject)
        if len(attempts) == 1:
            raise ValueError("no memory")
        return len(attempts)

    subject = Subject()
    with pytest.raises(ValueError, match="no memory"):
        fails_once(subject)
    assert fails_once(subject) == 2


def test_keeps_name_and_docstring():
    @cached_by_identity(maxsize=1)
    def waves(spans):
        """As few as possible."""

    assert (waves.__name__, waves.__doc__) == ("waves", "As few as possible.")


@pytest.fixture()
def _threads_take_turns_often():
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(former)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_threads():
    """A forward may meet the backward of another layer, which autograd runs in its own thread."""
    function, subjects = Counted(8), [Subject() for _ in range(100)]
    errors, start = [], threading.Barrier(4)

    def work(step: int) -> None:
        start.wait()
        try:
            for i in range(2000):
                subject = subjects[i * step % len(subjects)]
                assert function.cached(subject, i % 3) == (id(subject), i % 3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 7, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
