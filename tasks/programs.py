"""The limits of a program that a model wrote, and the verdict on how it ended."""

from __future__ import annotations

from dataclasses import dataclass

CPU_SECONDS = 3  # code_eval's timeout is 3 s too, but of elapsed time
WALL = 10  # elapsed over processor time: a busy machine must not decide, sleepers must end
OUTCOMES = ("passed", "failed", "timeout", "memory", "refused")
MAX_PROGRAM = 1 << 20  # bytes of a program's text


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program. Memory, processor time and open files are limited for each process by itself; the
    other limits hold for all of the program's processes together."""

    cpu_seconds: int = CPU_SECONDS
    wall_seconds: int = WALL * CPU_SECONDS
    memory_bytes: int = 2 << 30  # the most address space
    processes: int = 32  # processes and threads together
    file_bytes: int = 16 << 20  # the largest size of one file
    open_files: int = 64
    files_bytes: int = 64 << 20  # size of all files together, which lie in memory; only under isolation
    files: int = 4096  # number of files; only under isolation

    @classmethod
    def of_seconds(cls, seconds: int | None) -> ProgramLimits:
        """The limits with `seconds` of processor time; None: the usual time."""
        return cls() if seconds is None else cls(cpu_seconds=seconds, wall_seconds=WALL * seconds)


@dataclass(frozen=True)
class ProgramVerdict:
    """How a program ended. `timeout` is no `failed`: on a faster machine it might have passed."""

    outcome: str  # one of OUTCOMES; refused: the program was not run
    detail: str = ""  # one short line: the exception, or which limit

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}" if self.detail else self.outcome
