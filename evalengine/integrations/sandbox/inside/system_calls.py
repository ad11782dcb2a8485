"""Refuses a program, and all that it starts, the system calls by which it could lift its limits, reach what is not its
own, or hide memory from both: a seccomp filter, which no process can take off again.

A refused call answers ENOSYS, as on a kernel that lacks it, so that libraries take their other way. The numbers are
those of the kernel's headers (unistd.h, audit.h, filter.h, seccomp.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # machine -> (column below, AUDIT_ARCH_...)
REFUSED = {  # name -> its numbers on x86-64 and arm64
    # New namespaces give a process rights in them: to mount a folder in memory of its own size, for one.
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
    """Gives this process a keyring of its own in place of the session's, whose names /proc/keys would still show."""
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
