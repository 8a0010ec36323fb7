"""Probes find the lines that coverage's tracer finds."""

import ast
import sys

import coverage

from tests.support import line_probes

PROGRAM = '''"""A module."""
import functools


def decorate(function):
    """Called."""
    return functools.wraps(
        function
    )(function)


@decorate
@functools.cache
def branches(x):
    """Has
    every kind of statement."""
    if x > 2:
        return 1
    elif x > 1:
        y = [
            z
            for z in range(3)
        ]
    else:
        pass
    for _ in range(x):
        if x == 7:
            continue
        break
    else:
        y = 5
    while False:
        y = 3
    try:
        y = 4
        raise ValueError
        y = 5
    except KeyError:
        y = 6
    except (
        ValueError
    ):
        y = 7
    finally:
        y = 8
    with open("/dev/null"):
        y = 9
    match x:
        case 1:
            y = 10
        case _:
            y = 11
    return y


class Thing:
    """Thing."""

    field: int = 3

    @property
    def value(self):
        return 2

    def nothing(self):
        """Only says so."""

    def unused(self):
        return lambda: (
            3
        )


def generator():
    yield 1
    yield 2


async def later():
    return 1


branches(1)
branches(2)
Thing().nothing()
next(generator())
'''


def missing(path, lines) -> list[int]:
    """The lines that coverage reports as missing, given those that have run."""
    data = coverage.CoverageData(no_disk=True)
    data.add_lines({str(path): lines})
    measured = coverage.Coverage(data_file=None, config_file=False)
    measured.get_data().update(data)
    return measured.analysis2(str(path))[3]


def test_lines_of_a_tracer(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    traced: set[int] = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename != str(path):
            return None
        if event == "line":
            traced.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(compile(PROGRAM, path, "exec"), {"__name__": "program"})
    finally:
        sys.settrace(before)
    found: dict[int, int] = {}
    tree = line_probes.Probes().visit(ast.parse(PROGRAM))
    exec(compile(tree, path, "exec"), {"__name__": "program", "__lines__": found})
    assert missing(path, traced)
    # A handler that did not match has been looked at, which no statement can say.
    unmatched = PROGRAM.splitlines().index("    except KeyError:") + 1
    assert missing(path, list(found)) == sorted([unmatched, *missing(path, traced)])
