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
ASYNC_COPY = re.compile(r"^(LDGSTS|UBLKCP|UTMALDG)")
# What an instruction keeps busy beside a slot to issue it, the first that matches; else "int", or "scalar" where AMD issues it apart.
CLASSES = {
    "matrix": MATRIX,
    "exp": re.compile(r"^(MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_)"),
    "control": re.compile(
        r"^(BRA|BAR|BSSY|BSYNC|WARPSYNC|WARPGROUP|DEPBAR|LDGDEPBAR|NOP|EXIT|CALL|RET|FENCE|MEMBAR|ERRBAR|SYNCS|UTCBAR|YIELD|BREAK|ELECT"
        r"|s_waitcnt|s_wait_|s_barrier|s_c?branch|s_nop|s_set|s_endpgm|s_delay|s_sleep)"
    ),
    "shared": re.compile(r"^(LDS|STS|ATOMS|SHFL|LDT|STT|ds_)"),
    "global": re.compile(r"^(LDG|STG|LDL|STL|LDC|ULDC|LD$|ST$|ATOM|RED|UTMA|UBLK|global_|buffer_|flat_|scratch_|s_load|s_buffer)"),
    "conversion": re.compile(r"^(F2|I2|FRND|v_cvt_)"),
    "float": re.compile(r"^([FHD](ADD|MUL|FMA|MNMX|SET|SEL|CHK)|v_\w*_(f16|f32|f64|bf16)(_|$))"),
    "scalar": re.compile(r"^s_"),
}

_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)((?:\.[A-Z0-9_]+)*)\s*(.*?);")
_GCN_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_GCN_LINE = re.compile(r"^\s+([a-z][a-z0-9_]+)\b\s*(.*)$")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: where it stands.
        name: without modifiers.
        target: where it branches to, if it does.
        size: bytes that it moves from or to memory for a thread, as far as its name says.
    """

    address: int
    name: str
    target: int | None = None
    size: int = 0


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
        [Instruction(address=16, name='BRA', target=32, size=0)]
        >>> parse_sass("        /*0010*/              LDSM.16.M88.4 R4, [R1] ;")[0].size
        16
    """
    found = []
    for line in text.splitlines():
        match = _SASS_LINE.match(line)
        if match:
            address, name, modifiers, operands = match.groups()
            target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
            size = _sass_size(name, modifiers.split(".")[1:])
            found.append(Instruction(int(address, 16), name, int(target[1], 16) if target else None, size))
    return found


def _sass_size(name: str, modifiers: list[str]) -> int:
    """Bytes that a load or store moves for a thread; those of tensor memory and bulk copies have none.

    A shuffle goes the way of shared memory.
    """
    if name in ("LDSM", "STSM"):
        return 4 * next((int(text) for text in modifiers if text in ("2", "4")), 1)
    if name not in ("LDG", "LDGSTS", "LDS", "STS", "STG", "LDL", "STL", "SHFL"):
        return 0
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[text] for text in modifiers if text in sizes), 4)


def parse_gcn(text: str) -> list[Instruction]:
    """The instructions of an AMD assembly text; an address is the number of the instruction.

    Example:
        >>> parse_gcn(".LBB0_1:\\n\\tv_add_f32 v0, v1, v2\\n\\ts_cbranch_scc1 .LBB0_1")[1]
        Instruction(address=1, name='s_cbranch_scc1', target=0, size=0)
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
        Instruction(i, name, labels.get(operands) if is_branch.match(name) else None, _gcn_size(name))
        for i, (name, operands) in enumerate(lines)
    ]


def _gcn_size(name: str) -> int:
    """Bytes that a load or store moves for a lane; a shuffle goes the way of shared memory."""
    if name.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
        return 4
    match = re.match(
        r"(?:ds_(?:read|write|load|store)|(?:global|buffer|flat|scratch)_(?:load|store))(?:_lds)?(2?)(?:st64|addr)?_(\w+)", name
    )
    if match is None:
        return 0
    words, bits = re.search(r"dwordx?(\d*)", match[2]), re.search(r"[a-z](\d+)", match[2])
    small = 2 if "short" in match[2] else 1 if "byte" in match[2] else 0
    size = 4 * int(words[1] or 1) if words else int(bits[1]) // 8 if bits else small
    return size * (2 if match[1] else 1)


def main_loop(instructions: list[Instruction]) -> list[Instruction]:
    """The loop with most matrix instructions, of those that enclose no other loop with matrix instructions; empty if there is none."""
    loops = []
    for instruction in instructions:
        if instruction.target is not None and instruction.target <= instruction.address:
            body = [i for i in instructions if instruction.target <= i.address <= instruction.address]
            matrix = sum(bool(MATRIX.match(i.name)) for i in body)
            if matrix:
                loops.append((instruction.target, instruction.address, matrix, body))
    inner = [loop for loop in loops if not any(other is not loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)]
    # Of equal ones that which copies ahead, then the shorter: it is the one without masks.
    return max(inner, key=lambda loop: (loop[2], any(ASYNC_COPY.match(i.name) for i in loop[3]), -len(loop[3])), default=(0, 0, 0, []))[3]


def mix(instructions: list[Instruction]) -> Counter[str]:
    """How often each instruction stands in a piece of code."""
    return Counter(i.name for i in instructions)


def class_of(name: str) -> str:
    """What an instruction keeps busy: "matrix", "exp", "control", "shared", "global", "conversion", "float", "int" or "scalar".

    Example:
        >>> [class_of(name) for name in ("HMMA", "MUFU", "LDSM", "LDGSTS", "F2FP", "FFMA", "IMAD", "v_perm_b32", "s_add_i32")]
        ['matrix', 'exp', 'shared', 'global', 'conversion', 'float', 'int', 'int', 'scalar']
    """
    return next((kind for kind, pattern in CLASSES.items() if pattern.match(name)), "int")


def bytes_moved(instructions: list[Instruction], kind: str) -> int:
    """Bytes that a piece of code moves for each thread from and to "shared" or "global" memory.

    What goes from one to the other without a register on the way (LDGSTS) counts for both.

    Example:
        >>> code = parse_sass("/*0010*/ LDGSTS.E.BYPASS.128 [R1], [R2] ;\\n/*0020*/ LDS.64 R2, [R1] ;")
        >>> bytes_moved(code, "shared"), bytes_moved(code, "global")
        (24, 16)
    """
    return sum(i.size for i in instructions if class_of(i.name) == kind or (kind == "shared" and i.name == "LDGSTS"))
