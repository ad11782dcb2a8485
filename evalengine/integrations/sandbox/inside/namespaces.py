"""Takes network, files and the sight of other processes away from a process, and the system calls by which it could
lift its limits, reach what is not its own, or hide memory from both. Needs Linux 5.12 or newer.

An ordinary user's process needs a user its own namespace for that; root's process needs none, and becomes a user
with an unused id. A seccomp filter blocks system calls; no process can remove it, nor can what it
starts. A refused call answers ENOSYS, as on a kernel that lacks it, so that libraries take their other way. Constants
and numbers are those of the kernel's headers (sched.h, mount.h, prctl.h, capability.h, unistd.h, audit.h, filter.h,
seccomp.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from contextlib import nullcontext, suppress

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_SETATTR = 442  # the system call's number, on every architecture
READ_ONLY = 1 | 2  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
PDEATHSIG, DUMPABLE, SUBREAPER, NO_NEW_PRIVS = 1, 4, 36, 38
NOBODYS = 0x70000000  # plus a process id: a user id for one program, so that the kernel counts its processes alone
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")  # shared libraries
DEVICES = ("null", "zero", "full", "random", "urandom")
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # machine -> (column below, AUDIT_ARCH_...)
REFUSED = {  # name -> its numbers on x86-64 and arm64
    # New namespaces give a process rights in them: for example to mount a folder of any size in memory.
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435),
    # Memory that belongs to no process, or to no limit.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # The caller's keys, and the processes that watch.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # The kernel's own inside.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "syslog": (103, 116),
}  # fmt: skip
# Refused unless the first argument is one of these: another process's limits, and networks that no namespace holds (a
# virtual machine's way to its host is one). UNIX, INET and INET6 sockets stay.
ONLY = {"prlimit64": ((302, 261), (0,)), "socket": ((41, 198), (1, 2, 10)), "socketpair": ((53, 199), (1, 2, 10))}
CLONE, NAMESPACES = (56, 220), 0x7E020000  # CLONE_NEW..., refused as flags of clone
UNKNOWN = 463  # the first number that this list does not judge; no program needs so new a call
JOIN_SESSION_KEYRING, SET_MODE_FILTER, SPEC_ALLOW = 1, 1, 4  # SPEC_ALLOW: older kernels slow filtered processes down
SECCOMP = (317, 277)
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
CALL, ARCHITECTURE, FIRST = 0, 4, 16  # where seccomp_data has the number, the architecture and the first argument
ALLOW, REFUSE = 0x7FFF0000, 0x50000 | errno.ENOSYS

_libc = ctypes.CDLL(None, use_errno=True)


class NotShown(OSError):
    """A folder that Python needs cannot be shown to programs."""


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    _call("prctl", *map(ctypes.c_ulong, (option, value, 0, 0, 0)))


def enter() -> None:
    """Moves this process into namespaces of its own (network, files, IPC), and its next child, too (processes).
    Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _call("unshare", NEWNS | NEWIPC | NEWPID | NEWNET)
        return
    _call("unshare", NEWUSER | NEWNS | NEWIPC | NEWPID | NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def new_root(size: int, inodes: int) -> None:
    """Makes a root folder in memory that holds Python and the system's libraries, read-only, and /tmp. This process
    sees no other files and no sockets of other programs; the folder ends with it. Raises OSError.

    size: bytes that it can hold; inodes: files.
    """
    places, links = _places()
    os.umask(0o222)  # no one writes to the new folders, but where a mode is set below
    _call("mount", None, b"/", None, REC | PRIVATE, None)
    options = f"size={size},nr_inodes={inodes},mode=0555".encode()
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", NOSUID | NODEV, options)
    os.mkdir("/tmp/old")
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for place in (*places, *(f"/dev/{name}" for name in DEVICES)):
        try:
            _show(place)
        except OSError as error:
            raise NotShown(error.errno, f"{place} cannot be shown to programs: {error.strerror}") from error
    for link, target in links.items():
        os.makedirs(os.path.dirname(link), 0o755, exist_ok=True)
        if not os.path.lexists(link):  # as a link inside a folder that is shown
            os.symlink(target, link)
    for folder, mode in (("/tmp", 0o1777), ("/dev/shm", 0o1777), ("/proc", 0o755)):
        os.makedirs(folder, 0o755, exist_ok=True)
        os.chmod(folder, mode)
    # The kernel refuses where the old /proc is partly hidden, as in a container; then the program has no /proc.
    with suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None)
    _call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    os.umask(0o022)


def _places() -> tuple[list[str], dict[str, str]]:
    """The folders that Python needs, none of which contains another; and what the symbolic links that lead to them, and
    to Python itself, hold."""
    names = (*SYSTEM, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    links: dict[str, str] = {}
    folders = {_followed(name, links) for name in names if os.path.exists(name)}
    _followed(sys.executable, links)
    return [place for place in folders if not any(place.startswith(f"{outer}/") for outer in folders)], links


def _followed(path: str, links: dict[str, str]) -> str:
    """The real path of what exists at `path`; notes each symbolic link on the way there, and what it holds."""
    real, parts = "/", path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part == "..":
            real = os.path.dirname(real)
        elif os.path.islink(step := os.path.normpath(os.path.join(real, part))):
            links[step] = os.readlink(step)
            parts += links[step].split("/")[::-1]
            real = "/" if links[step].startswith("/") else real
        else:
            real = step
    return real


def _show(place: str) -> None:
    """Makes a folder or file of the old root visible under its name, read-only."""
    old = f"/old{place}"
    os.makedirs(os.path.dirname(place), 0o755, exist_ok=True)
    if stat.S_ISDIR(os.stat(old).st_mode):
        os.makedirs(place, 0o755, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", old.encode(), place.encode(), None, BIND | REC, None)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, size)


def drop_rights(user: int | None, isolated: bool) -> None:
    """Drops all capabilities for good, and the system calls that a program does not need; and becomes `user`, if one
    is named, which only root may do. Raises OSError."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(NO_NEW_PRIVS, 1)
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    prctl(DUMPABLE, 1)  # the watcher has cleared it, and so has the change of user; /proc/self needs it
    with nullcontext() if isolated else suppress(OSError):  # without isolation only where the kernel has filters
        refuse()


def refuse() -> None:
    """Filters this process's system calls from now on. Raises OSError."""
    if (known := ARCHITECTURES.get(os.uname().machine)) is None:
        raise OSError(errno.ENOSYS, f"no list of system calls for a processor of type {os.uname().machine}")
    column, architecture = known
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter(column, architecture))
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=H6xQ", len(code) // 8, ctypes.addressof(text))
    if _libc.syscall(ctypes.c_long(SECCOMP[column]), SET_MODE_FILTER, SPEC_ALLOW, program):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def leave_keys() -> None:
    """Gives this process a new keyring instead of the session's, whose names /proc/keys would still show."""
    with suppress(KeyError):
        column, _ = ARCHITECTURES[os.uname().machine]
        # A kernel that has no keyrings, or forbids their use, shows none either.
        _libc.syscall(ctypes.c_long(REFUSED["keyctl"][column]), JOIN_SESSION_KEYRING, None)


def _filter(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
    """The filter's instructions: code, how many to skip if true and if false, operand."""
    refused, allowed = (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), refused]
    code += [(LOAD, 0, 0, CALL), (AT_LEAST, 0, 1, UNKNOWN), refused]
    for numbers in REFUSED.values():
        code += [(EQUAL, 0, 1, numbers[column]), refused]
    for numbers, values in ONLY.values():
        tests = [(EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
        code += [(EQUAL, 0, len(tests) + 3, numbers[column]), (LOAD, 0, 0, FIRST), *tests, refused, allowed]
    code += [(EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST), (ANY_BIT, 0, 1, NAMESPACES), refused]
    return [*code, allowed]
