"""Has the kernel ask the guardian before anything below it starts a process, so that a fork bomb never grows.

Counting processes from outside comes too late: in the 50 ms between two looks a bomb makes hundreds, and whoever should
kill them no longer gets a turn (tried: load 900, and alive ten seconds later). RLIMIT_NPROC counts a user's processes
everywhere, and does not bind root. A seccomp filter with a listener (Linux 5.5, no privileges needed) binds everybody,
through `setsid`, `exec` and double forks. Threads are let through. Where the kernel has no such filter, the looks
remain.

Source: `man 2 seccomp`, `man 2 seccomp_unotify`.
"""

import ctypes
import errno
import fcntl
import platform
import struct
from collections.abc import Callable

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_ALLOW, _NOTIFY, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_LOAD_WORD, _IF_EQUAL, _IF_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_CLONE_THREAD = 0x00010000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE_BYTES = 80

_CLONE3 = 435
_MACHINES = {  # audit architecture, then the system calls seccomp, clone, and the older fork and vfork
    "x86_64": (0xC000003E, 317, 56, (57, 58)),
    "aarch64": (0xC00000B7, 277, 220, ()),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def ask_before_forks() -> int | None:
    """Gate the forks of this thread, and of all that it starts from now on, for ever.

    Returns:
        A descriptor for whoever decides (`decide`); None where the kernel has no such filter.
    """
    if platform.machine() not in _MACHINES:
        return None
    code = _filter(*_MACHINES[platform.machine()])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # asked for in return for a filter without privileges
    buffer = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    number = _MACHINES[platform.machine()][1]
    descriptor = int(libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(program)))
    return descriptor if descriptor >= 0 else None


def _filter(architecture: int, _: int, clone: int, forks: tuple[int, ...]) -> bytes:
    """Return the program: who asks to clone a thread passes, who asks for a process waits for word."""
    steps = [
        (_LOAD_WORD, 0, 0, 4),  # architecture; another one has other numbers
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_LOAD_WORD, 0, 0, 0),  # number of the system call
        # Its flags lie in memory, out of a filter's reach; the C library then falls back to clone.
        (_IF_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for fork in forks:
        steps += [(_IF_EQUAL, 0, 1, fork), (_RETURN, 0, 0, _NOTIFY)]
    steps += [
        (_IF_EQUAL, 0, 3, clone),
        (_LOAD_WORD, 0, 0, 16),  # the first argument: flags
        (_IF_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def decide(listener: int, *, is_allowed: Callable[[], bool]) -> bool:
    """Answer one question that waits on the descriptor; who may not start a process is told to try again later.

    Returns:
        What was decided; True where whoever asked is gone.
    """
    notice = bytearray(_NOTICE_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
        (question,) = struct.unpack_from("=Q", notice)
        allowed = is_allowed()
        error, flags = (0, _CONTINUE) if allowed else (-errno.EAGAIN, 0)
        fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", question, 0, error, flags))
    except OSError:
        return True
    return allowed
