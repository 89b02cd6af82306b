import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.planner.processes import local_processes, processors

ROOT = Path(__file__).parents[3]


def test_one_process_is_this_one():
    with local_processes(1) as executor:
        assert executor is None
    assert processors() >= 1


def test_work_is_done_elsewhere_and_nobody_stays():
    with local_processes(2) as executor:
        assert executor is not None
        assert os.getpid() not in executor.map(_pid, range(4))
    assert not multiprocessing.active_children()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_helpers_end_with_a_killed_parent(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from sim.planner.processes import local_processes\n"
        "if __name__ == '__main__':\n"
        "    with local_processes(2) as executor:\n"
        "        print(*set(executor.map(divmod, [1] * 8, [1] * 8)), *executor._processes, flush=True)\n"
        "        time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        helpers = [int(word) for word in parent.stdout.readline().split()[2:]]
        assert helpers
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(_is_alive, helpers)):
        assert time.monotonic() < deadline, "helpers outlive their parent"
        time.sleep(0.05)


def _pid(_: int) -> int:
    return os.getpid()


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
