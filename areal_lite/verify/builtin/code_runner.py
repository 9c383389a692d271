"""Runs a candidate's program for one case after another, each in a fork of one interpreter that has already started.

    python code_runner.py SOCKET candidate.py stdin CPU_SECONDS

Works inside the sandbox, for `program.py`. A byte on the socket asks for a case, whose standard input then lies in the
file `stdin`; the answer is `[wait status, processor seconds]`. The program's output goes where this process's goes.
Standard library only, no other file of ours.
"""

import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import socket
import sys
import types

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def run_cases(channel: socket.socket, stdin: str, cpu_s: int) -> bool:
    """Answer until the other side hangs up; True in the process of a case, which then runs the program.

    In a namespace where this is process 1 no program can signal it, and as it is not dumpable none can look into it.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    kept = set(os.listdir("."))
    gc.freeze()  # what is left alone by the collector is not copied in each fork
    channel.sendall(b"ready\n")
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
        channel.sendall(json.dumps([status, usage.ru_utime + usage.ru_stime]).encode() + b"\n")
    return False


def _become_a_case(stdin: str, cpu_s: int) -> None:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


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


def _main(descriptor: str, program: str, stdin: str, cpu_s: str) -> None:
    sys.set_int_max_str_digits(0)
    with open(program, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    channel = socket.socket(fileno=int(descriptor))
    if not run_cases(channel, stdin, int(cpu_s)):
        return
    channel.detach()  # it is closed already
    main = types.ModuleType("__main__")
    main.__file__, sys.argv, sys.modules["__main__"] = program, [program], main
    exec(compile(source, program, "exec"), vars(main))


if __name__ == "__main__":
    _main(*sys.argv[1:])
