"""What runs inside a sandbox of the verifier `code`. Standard library only; its only other file of ours is `remote.py`.

    python inside.py LIMITS CPU_SECONDS FILE SOCKET

It limits itself (bubblewrap must not be bound by these limits), writes a byte to the socket once the sandbox stands,
and then runs the program in FILE for one case after another, each in a fork of this interpreter. Where it is process 1
of a namespace no program can signal it, and as it is not dumpable none can look into it.

A byte on the socket asks for a case: `c` runs the program, with the file `stdin` beside it as standard input; `t` and a
line of JSON run assert-style tests in this process, on functions of the program in the fork (`remote.py`). The answer
is a line for each test, then `[end, processor seconds]`, where the end is a wait status, null for a program that still
ran, or `cpu` if it was the tests that took too long. The program's output goes where this process's goes.
"""

import ctypes
import errno
import gc
import importlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import sys
import types

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_LIBC = ctypes.CDLL(None)
_LINK = 3
"""The descriptor by which a tested program answers."""

_HIDDEN_MEMORY = {
    # Audit architecture, then the system calls memfd_create, memfd_secret, shmget, msgget, semget, io_uring_setup.
    "x86_64": (0xC000003E, (319, 447, 29, 68, 64, 425)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 190, 425)),
}


def limit_itself(limits: dict[str, int]) -> None:
    """Set limits, by the names of `resource`, of this process and all that it starts."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def limit_time(cpu_s: int) -> None:
    """End this process, and each that it starts, after so many processor seconds, first with SIGXCPU."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def refuse_hidden_memory() -> None:
    """Have the kernel refuse system calls that allocate memory which no process is charged for.

    A file in memory or a segment of System V shared memory is in no process's resident memory while it is not mapped,
    and a segment outlives its process. Other architectures than those in the table stay without this filter.

    Source: `man 2 seccomp`.
    """
    if platform.machine() not in _HIDDEN_MEMORY:
        return
    architecture, calls = _HIDDEN_MEMORY[platform.machine()]
    load_word, if_equal, if_at_least, done = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.ENOSYS
    program = [
        (load_word, 0, 0, 4),  # the architecture: another one has other numbers
        (if_equal, 1, 0, architecture),
        (done, 0, 0, refuse),
        (load_word, 0, 0, 0),  # the number of the system call; those of the x32 interface begin at 2**30
        (if_at_least, 0, 1, 0x40000000),
        (done, 0, 0, refuse),
    ]
    for call in calls:
        program += [(if_equal, 0, 1, call), (done, 0, 0, refuse)]
    program.append((done, 0, 0, allow))
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0)


def serve_cases(channel: socket.socket, folder: str, cpu_s: int) -> bytes:
    """Answer until the other side hangs up; in the process of a case, this returns what was asked for."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    kept = set(os.listdir("."))
    gc.freeze()  # what is left alone by the collector is not copied in each fork
    channel.sendall(b"r")
    while request := channel.recv(1):
        ours, link = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            channel.detach()
            ours.detach()
            _become_a_case(os.path.join(folder, "stdin"), link.detach(), cpu_s, is_tested=request == b"t")
            return request
        link.close()
        # The tests are read only now, so that no copy of them is in the program's memory.
        is_gone = _run_tests(channel, ours, folder, cpu_s) if request == b"t" else True
        ours.close()
        if not is_gone:
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        _end_the_rest()
        _remove(set(os.listdir(".")) - kept)
        answer = [status if is_gone else None, usage.ru_utime + usage.ru_stime]
        channel.sendall(json.dumps(answer).encode() + b"\n")
    return b""


def _become_a_case(stdin: str, link: int, cpu_s: int, *, is_tested: bool) -> None:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    if is_tested:
        os.dup2(link, _LINK, inheritable=False)
    os.closerange(_LINK + 1 if is_tested else _LINK, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    limit_time(cpu_s)


def _run_tests(channel: socket.socket, link: socket.socket, folder: str, cpu_s: int) -> bool:
    """Run the tests that arrive on the channel; returns whether the program is gone, or hung up."""

    def end(*_: object) -> None:
        channel.sendall(b'["cpu", 0]\n')
        os._exit(1)

    signal.signal(signal.SIGXCPU, end)
    limit_time(cpu_s)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
    return bool(_remote(folder).test(link, channel.makefile("rw", encoding="utf-8")))


def _remote(folder: str) -> types.ModuleType:
    sys.path.append(folder)
    module = importlib.import_module("remote")
    sys.path.pop()
    return module


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


def _remove(names: set[str]) -> None:
    for name in names:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
        else:
            os.unlink(name)


def main(limits: str, cpu_s: str, file: str, descriptor: str) -> None:
    """Serve cases; in the process of a case, run the program or answer its tests."""
    sys.set_int_max_str_digits(0)  # JSON holds numbers of any length; time has a limit of its own
    folder = os.path.dirname(file)
    with open(file, encoding="utf-8", errors="surrogatepass") as stream:
        content = stream.read()
    limit_itself(json.loads(limits))
    refuse_hidden_memory()
    request = serve_cases(socket.socket(fileno=int(descriptor)), folder, int(cpu_s))
    if request == b"t":
        _remote(folder).serve(socket.socket(fileno=_LINK), content)
    elif request == b"c":
        program = types.ModuleType("__main__")
        program.__file__, sys.argv, sys.modules["__main__"] = file, [file], program
        exec(compile(content, file, "exec"), vars(program))


if __name__ == "__main__":
    main(*sys.argv[1:])
