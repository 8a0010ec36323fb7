"""A mistake under torchrun: one line of ours, and torchrun's report about one process.

If this fails, the mistake is hidden among reports about processes that torchrun ended.
"""

import subprocess


def test_a_mistake(torchrun):
    message = "--save /dev/null cannot be written: not a folder"
    process = torchrun("--save /dev/null", 2, stderr=subprocess.PIPE)
    output, error = process.communicate(timeout=300)
    assert (process.returncode, output) == (1, "")
    lines = error.splitlines()
    # Once as our line, and once as the reason in torchrun's report.
    assert lines.count(f"train.py: error: {message}") == 1
    assert [line for line in lines if line.endswith(f": train.py: error: {message}")] == [
        f"  traceback : train.py: error: {message}"
    ]
    assert error.count("  rank      : ") == 1
    assert "<NO_OTHER_FAILURES>" in error
