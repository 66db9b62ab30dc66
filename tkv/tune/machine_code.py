"""What a compiled kernel needs and what its main loop executes, read from its machine code. No GPU is needed.

NVIDIA code is read through the ``cuobjdump`` that ships in Triton's wheel, AMD code from the assembly text.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MATRIX = re.compile(r"^(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA|v_mfma|v_wmma|v_smfmac)")

_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)((?:\.[A-Z0-9_]+)*)\s*(.*?);")
_GCN_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_GCN_LINE = re.compile(r"^\s+([a-z][a-z0-9_]+)\b\s*(.*)$")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: where it stands, its name without modifiers, and where it branches to, if it does."""

    address: int
    name: str
    target: int | None = None


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of an SM.

    Attributes:
        registers: 32-bit registers a thread; on AMD vector registers, accumulation registers included.
        spills: bytes of stack a thread on NVIDIA; spilled vector registers on AMD.
    """

    registers: int
    spills: int


@lru_cache(maxsize=1)
def cuobjdump() -> str:
    """Path of the tool in Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([cuobjdump(), option, file.name], capture_output=True, text=True, check=True).stdout


def nvidia_usage(cubin: bytes) -> Usage:
    """Registers and stack of the kernel in a cubin."""
    text = _dump(cubin, "-res-usage")
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump did not print the resource usage: {text[:200]!r}")
    return Usage(int(registers[1]), int(stack[1]))


def amd_usage(assembly: str) -> Usage:
    """Vector registers and their spills, from the metadata at the end of the assembly."""
    registers, spills = re.search(r"\.vgpr_count:\s+(\d+)", assembly), re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    if registers is None or spills is None:
        raise RuntimeError("the assembly has no .vgpr_count and .vgpr_spill_count")
    return Usage(int(registers[1]), int(spills[1]))


def nvidia_instructions(cubin: bytes) -> list[Instruction]:
    """The kernel in a cubin, in order."""
    return parse_sass(_dump(cubin, "-sass"))


def parse_sass(text: str) -> list[Instruction]:
    """The instructions in ``cuobjdump -sass``'s listing.

    Example:
        >>> parse_sass("        /*0010*/              @P0 BRA 0x20 ;   /* 0x1 */")
        [Instruction(address=16, name='BRA', target=32)]
    """
    found = []
    for line in text.splitlines():
        match = _SASS_LINE.match(line)
        if match:
            address, name, _, operands = match.groups()
            target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
            found.append(Instruction(int(address, 16), name, int(target[1], 16) if target else None))
    return found


def parse_gcn(text: str) -> list[Instruction]:
    """The instructions of an AMD assembly text; an address is the number of the instruction.

    Example:
        >>> parse_gcn(".LBB0_1:\\n\\tv_add_f32 v0, v1, v2\\n\\ts_cbranch_scc1 .LBB0_1")[1]
        Instruction(address=1, name='s_cbranch_scc1', target=0)
    """
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        label, instruction = _GCN_LABEL.match(line), _GCN_LINE.match(line)
        if label:
            labels[label[1]] = len(lines)
        elif instruction and not instruction[1].startswith("."):
            lines.append((instruction[1], instruction[2].split(";")[0].strip()))
    is_branch = re.compile(r"s_c?branch")
    return [
        Instruction(i, name, labels.get(operands) if is_branch.match(name) else None) for i, (name, operands) in enumerate(lines)
    ]


def main_loop(instructions: list[Instruction]) -> list[Instruction]:
    """The loop with most matrix instructions, of those that enclose no other loop with matrix instructions; empty if there is none."""
    loops = []
    for instruction in instructions:
        if instruction.target is not None and instruction.target <= instruction.address:
            body = [i for i in instructions if instruction.target <= i.address <= instruction.address]
            matrix = sum(bool(MATRIX.match(i.name)) for i in body)
            if matrix:
                loops.append((instruction.target, instruction.address, matrix, body))
    inner = [
        loop for loop in loops if not any(other is not loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    # Of equal ones the shorter: it is the one without masks.
    return max(inner, key=lambda loop: (loop[2], -len(loop[3])), default=(0, 0, 0, []))[3]


def mix(instructions: list[Instruction]) -> Counter[str]:
    """How often each instruction stands in a piece of code."""
    return Counter(i.name for i in instructions)
