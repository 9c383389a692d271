"""What runs inside a sandbox of the verifier `code`. Standard library only; its only other file of ours is `remote.py`.

    python inside.py LIMITS CPU_SECONDS ROLE FILE SOCKET [LINK]

It limits itself (bubblewrap must not be bound by these limits), says on the socket that the sandbox stands, and then
plays a role:

- `cases`: runs the program in FILE for one case after another, each in a fork of this interpreter. A byte on the socket
  asks for a case, whose standard input lies in the file `stdin` beside it; the answer is `[wait status, processor
  seconds]`. The program's output goes where this process's goes.
- `serve` and `test`: the two sides of assert-style tests, joined by LINK (`remote.py`).
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import types

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_LIBC = ctypes.CDLL(None)


def limit_itself(limits: dict[str, int]) -> None:
    """Set limits, by the names of `resource`, of this process and all that it starts."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def limit_time(cpu_s: int) -> None:
    """End this process, and each that it starts, after so many processor seconds: first with a signal that says why."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


# --- one case after another ---


def run_cases(channel: socket.socket, stdin: str, cpu_s: int) -> bool:
    """Answer until the other side hangs up; True in the process of a case, which then runs the program.

    In a namespace where this is process 1 no program can signal it, and as it is not dumpable none can look into it.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    kept = set(os.listdir("."))
    gc.freeze()  # what is left alone by the collector is not copied in each fork
    channel.sendall(b"r")
    while channel.recv(1):
        pid = os.fork()
        if pid == 0:
            _become_a_case(stdin, cpu_s)
            return True
        _, status, usage = os.wait4(pid, 0)
        _end_the_rest()
        for name in set(os.listdir(".")) - kept:
            if os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        channel.sendall(json.dumps([status, usage.ru_utime + usage.ru_stime]).encode())
    return False


def _become_a_case(stdin: str, cpu_s: int) -> None:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    limit_time(cpu_s)


def _end_the_rest() -> None:
    """Kill what a case left running: orphans become children of this process."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(limits: str, cpu_s: str, role: str, file: str, descriptor: str, link: str = "") -> None:
    """Play a role; in the process of a case, this runs the program."""
    sys.set_int_max_str_digits(0)  # JSON holds numbers of any length; time has a limit of its own
    with open(file, encoding="utf-8", errors="surrogatepass") as stream:
        content = stream.read()
    limit_itself(json.loads(limits))
    channel = socket.socket(fileno=int(descriptor))
    if role == "cases":
        if run_cases(channel, os.path.join(os.path.dirname(file), "stdin"), int(cpu_s)):
            channel.detach()  # it is closed already
            program = types.ModuleType("__main__")
            program.__file__, sys.argv, sys.modules["__main__"] = file, [file], program
            exec(compile(content, file, "exec"), vars(program))
        return
    limit_time(int(cpu_s))
    with channel:
        channel.sendall(b"r")
    sys.path.append(os.path.dirname(file))
    remote = importlib.import_module("remote")
    sys.path.pop()
    getattr(remote, role)(socket.socket(fileno=int(link)), content)


if __name__ == "__main__":
    main(*sys.argv[1:])
