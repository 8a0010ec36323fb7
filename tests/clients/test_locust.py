"""locust: users that ask as fast as they are answered, none of them refused."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

# Its import would put gevent in the place of threads.
pytestmark = pytest.mark.skipif(find_spec("locust") is None, reason="needs locust")

USERS = """
from locust import HttpUser, task

class User(HttpUser):
    @task
    def ask(self):
        self.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4})
"""


def test_users(served, tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    words = "-f users.py --headless -u 4 -r 4 -t 3s --exit-code-on-error 1 --only-summary"
    command = [sys.executable, "-m", "locust", *words.split(), "--host", served.url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "POST" in done.stdout + done.stderr
