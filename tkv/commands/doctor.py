"""``tkv doctor``: what this machine can run, and what to set."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch

import tkv
from tkv.commands import Commands
from tkv.commands.output import bytes_text, print_json, print_table
from tkv.errors import TkvError

MIN_PYTHON, MIN_TRITON = (3, 10), (3, 6)
VARIABLES = {
    "TKV_CHECK": "synchronous checks of what only the GPU can see: slots, page ids, lengths",
    "TKV_PORTABLE": "kernels without inline PTX",
    "TKV_CONFIG_DIR": "tuning tables of this folder come before tkv's own",
    "TKV_CACHE_DIR": "where compiled candidates of tuning are remembered",
    "TRITON_INTERPRET": "kernels run in Triton's interpreter, slowly, on the CPU",
    "TRITON_CACHE_DIR": "where Triton keeps compiled kernels",
}
# Device files that a driver makes, and the build of torch that would use it.
DRIVERS = {"/dev/nvidiactl": "CUDA", "/dev/kfd": "ROCm"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `status` is ``"ok"``, ``"note"``, or ``"problem"`` where tkv cannot be used as it is."""

    name: str
    status: str
    text: str


def add(commands: Commands) -> None:
    """Add the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run, and what to set",
        description="Looks at versions, GPUs, tools, tuning tables and variables. The exit status is 0 if tkv can be used here, else 1.",
    )
    doctor.add_argument("--gpu", action="store_true", help="no GPU is a problem too")
    doctor.add_argument("--json", action="store_true", help="for machines")
    doctor.set_defaults(run=_run, interpret=False)


def _run(args: argparse.Namespace) -> int:
    gpus = list(_gpus())
    findings = [
        Finding("tkv", "ok", f"{tkv.__version__} in {Path(tkv.__file__).parent}"),
        *_versions(bool(gpus)),
        *_gpu_findings(gpus, args.gpu),
        *_tools(gpus),
        *_tables(gpus),
        *_folders(bool(gpus)),
        *_variables(bool(gpus)),
    ]
    usable = not any(finding.status == "problem" for finding in findings)
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
    where = f"on {names}" if gpus and not _is_set("TRITON_INTERPRET") else "in the interpreter"
    if args.json:
        print_json({"usable": usable, "gpus": gpus, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table([{"": finding.status, "what": finding.name, "found": finding.text} for finding in findings])
        print(f"\ntkv can be used here, {where}" if usable else "\ntkv cannot be used here before the problems are solved")
    return 0 if usable else 1


def _versions(has_gpu: bool) -> Iterator[Finding]:
    python = sys.version_info[:2]
    found = f"{sys.version.split()[0]} in {sys.prefix}"
    yield Finding("python", "ok", found) if python >= MIN_PYTHON else Finding("python", "problem", f"{found}: tkv needs 3.10 or later")
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU support"
    yield Finding("torch", "ok", f"{torch.__version__}, built with {build}")
    triton = _triton_version()
    if triton is None:
        yield Finding("triton", "problem", "missing: pip install 'triton>=3.6'")
    elif _numbers(triton) < MIN_TRITON:
        yield Finding("triton", "problem", f"{triton}: tkv needs 3.6 or later")
    elif _numbers(triton) == (3, 6) and _numbers(numpy.__version__) >= (2, 4):
        text = f"{triton} with numpy {numpy.__version__}: its interpreter needs numpy below 2.4"
        yield Finding("triton", "note" if has_gpu else "problem", text)
    else:
        yield Finding("triton", "ok", f"{triton}, numpy {numpy.__version__}")


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(major), int(minor)


def _triton_folder() -> Path | None:
    """Where Triton is installed, found without importing it."""
    spec = find_spec("triton")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _triton_version() -> str | None:
    """What Triton calls itself: its distribution has other names for other GPUs."""
    folder = _triton_folder()
    init = folder / "__init__.py" if folder else None
    match = re.search(r"""__version__ = ['"]([^'"]+)""", init.read_text(encoding="utf-8")) if init and init.is_file() else None
    return match[1] if match else None


def _gpus() -> Iterator[dict[str, Any]]:
    """The GPUs that torch sees; `arch` is None for one without kernels, and `problem` then says why."""
    from tkv.tune.arch import arch_of_device

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpu: dict[str, Any] = {"index": index, "name": properties.name, "arch": None, "problem": None}
        try:
            gpu["arch"] = arch_of_device(index).name
        except TkvError as error:
            gpu["problem"] = str(error)
        gpu["sms"] = properties.multi_processor_count
        gpu["shared_per_block"] = getattr(properties, "shared_memory_per_block_optin", None)
        gpu["memory"] = properties.total_memory
        yield gpu


def _gpu_findings(gpus: list[dict[str, Any]], needs_gpu: bool) -> Iterator[Finding]:
    from tkv.tune.runner import driver_version

    for gpu in gpus:
        shared = "" if gpu["shared_per_block"] is None else f", {bytes_text(gpu['shared_per_block'])} of shared memory a program"
        facts = f"{gpu['name']}, {gpu['arch']}, {gpu['sms']} SMs{shared}, {bytes_text(gpu['memory'])} of memory"
        name = f"gpu {gpu['index']}"
        yield Finding(name, "problem", f"{gpu['name']}: {gpu['problem']}") if gpu["problem"] else Finding(name, "ok", facts)
    if gpus:
        yield Finding("driver", "ok", driver_version() or "version unknown")
        return
    unused = [build for path, build in DRIVERS.items() if Path(path).exists()]
    if unused:
        text = f"a {unused[0]} driver is here, but torch {torch.__version__} sees no GPU: install torch for {unused[0]}, or mend the driver"
        yield Finding("gpu", "problem", text)
    elif needs_gpu:
        yield Finding("gpu", "problem", "none")
    elif _is_set("TRITON_INTERPRET"):
        yield Finding("gpu", "note", "none, and TRITON_INTERPRET is set: kernels run in the interpreter")
    else:
        yield Finding("gpu", "note", "none: set TRITON_INTERPRET=1 to run in the interpreter")


def _tools(gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    folder = _triton_folder()
    for name, used in (("ptxas", "compile for NVIDIA GPUs"), ("cuobjdump", "read machine code: tkv inspect, check, tune")):
        override = os.environ.get(f"TRITON_{name.upper()}_PATH")
        path = Path(override) if override else folder / "backends" / "nvidia" / "bin" / name if folder else None
        if path is not None and os.access(path, os.X_OK):
            yield Finding(name, "ok", str(path))
        else:
            is_needed = name == "ptxas" and torch.version.cuda is not None and bool(gpus)
            yield Finding(name, "problem" if is_needed else "note", f"missing in Triton's package; without it tkv cannot {used}")
    if gpus:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if compiler is None or shutil.which(compiler) is None:
            yield Finding("C compiler", "problem", "none: Triton needs one to launch kernels; install gcc, or set CC")
        elif not header.is_file():
            yield Finding("C compiler", "problem", f"{compiler}, but no {header}: install Python's headers (python3-dev)")
        else:
            yield Finding("C compiler", "ok", compiler)


def _tables(gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    from tkv.tune.arch import ARCHS, configs_dir
    from tkv.tune.arch import arch as facts_of
    from tkv.tune.keys import OP_KINDS
    from tkv.tune.tables import table_path

    folder = configs_dir()
    of_arch = {arch: [op for op in OP_KINDS if table_path(folder, arch, op).is_file()] for arch in ARCHS}
    if not gpus:
        with_tables = [arch for arch, ops in of_arch.items() if ops]
        yield Finding("tables", "ok", f"for {len(with_tables)} of {len(ARCHS)} architectures in {folder}")
    for arch in dict.fromkeys(gpu["arch"] for gpu in gpus if gpu["arch"]):
        family = next((name for name in (arch, *facts_of(arch).family) if of_arch[name]), None)
        if family is None:
            yield Finding("tables", "note", f"none for {arch}: analytic defaults; `tkv tune` makes them")
        elif family == arch:
            yield Finding("tables", "ok", f"for {arch}: {', '.join(of_arch[arch])}")
        else:
            yield Finding("tables", "note", f"none for {arch}: those of {family} stand in ({', '.join(of_arch[family])})")


def _folders(has_gpu: bool) -> Iterator[Finding]:
    home = Path(os.path.expanduser("~"))
    ours = Path(os.environ.get("TKV_CACHE_DIR") or home / ".cache" / "tkv")
    tritons = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache")
    for name, path, variable, status in (
        ("cache", ours, "TKV_CACHE_DIR", "note"),
        ("Triton's cache", tritons, "TRITON_CACHE_DIR", "problem" if has_gpu else "note"),
    ):
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Finding(name, "ok", str(path))
        else:
            yield Finding(name, status, f"{path} cannot be written: set {variable} to a folder that can")


def _variables(has_gpu: bool) -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if name in VARIABLES:
            if not value:
                continue
            status, text = "ok", f"{value}: {VARIABLES[name]}" if _is_set(name) else f"{value}: off"
            if name == "TRITON_INTERPRET" and has_gpu and _is_set(name):
                status, text = "note", f"{text}, although there is a GPU"
            if name == "TKV_CONFIG_DIR" and not os.path.isdir(value):
                status, text = "problem", f"{value}: no such folder"
            yield Finding(name, status, text)
            if name == "TKV_CONFIG_DIR" and status == "ok":
                yield from _wrong_tables(Path(value))
        elif name.startswith("TKV_"):
            yield Finding(name, "note", f"{value}: no variable of tkv's that this version knows")


def _wrong_tables(folder: Path) -> Iterator[Finding]:
    """Tables of the user's that calls pass over."""
    from tkv.tune.select import coverage

    for row in coverage(folder):
        if row.is_wrong:
            yield Finding(f"{row.arch}/{row.op}", "problem", row.problem)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")
