"""Takes network, files and the sight of other processes away from a process. Needs Linux 5.12 or newer.

An ordinary user's process needs a user namespace of its own for that; root's process needs none, and becomes a user
whose id nobody has. The constants are those of the kernel's headers (sched.h, mount.h, prctl.h, capability.h).
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from contextlib import suppress

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_SETATTR = 442  # the system call's number, on every architecture
READ_ONLY = 1 | 2  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
PDEATHSIG, DUMPABLE, SUBREAPER, NO_NEW_PRIVS = 1, 4, 36, 38
NOBODYS = 0x70000000  # plus a process id: a user id for one program, so that the kernel counts its processes alone
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")  # shared libraries
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


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
    os.umask(0)
    places = _places()
    _call("mount", None, b"/", None, REC | PRIVATE, None)
    options = f"size={size},nr_inodes={inodes},mode=0755".encode()
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", NOSUID | NODEV, options)
    os.mkdir("/tmp/old")
    _call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for place in places:
        _show(place)
    for name in DEVICES:
        _show(f"/dev/{name}")
    for folder, mode in (("/tmp", 0o1777), ("/dev/shm", 0o1777), ("/proc", 0o755)):
        os.makedirs(folder, 0o755, exist_ok=True)
        os.chmod(folder, mode)
    # The kernel refuses where the old /proc is partly hidden, as in a container; then the program has no /proc.
    with suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None)
    _call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")


def _places() -> list[str]:
    """The folders that Python needs, by every name; no folder of the list lies in another."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    places: list[str] = []
    for place in (*SYSTEM, *sorted(prefixes | {os.path.realpath(prefix) for prefix in prefixes})):
        if os.path.lexists(place) and not any(place == outer or place.startswith(f"{outer}/") for outer in places):
            places.append(place)
    return places


def _show(place: str) -> None:
    """Makes a folder or file of the old root visible under its name, read-only."""
    old = f"/old{place}"
    os.makedirs(os.path.dirname(place), 0o755, exist_ok=True)
    if os.path.islink(old) and place in SYSTEM:  # as /lib, which may point to usr/lib
        os.symlink(os.readlink(old), place)
        return
    if stat.S_ISDIR(os.stat(old).st_mode):
        os.makedirs(place, 0o755, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", old.encode(), place.encode(), None, BIND | REC, None)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, size)


def drop_rights(user: int | None) -> None:
    """Drops all capabilities for good; and becomes `user`, if one is named, which only root may do."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(NO_NEW_PRIVS, 1)
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    prctl(DUMPABLE, 1)  # the change of user cleared it; /proc/self needs it
