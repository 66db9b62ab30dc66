"""``tkv inspect``: what a kernel takes of an architecture, and what its loop executes, read from machine code without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tkv.commands import Commands
from tkv.commands.arguments import arch, part, positive
from tkv.commands.cases import INSPECTED_OPS, add_call, case_of, config_text, config_with, overrides
from tkv.commands.output import Progress, bytes_text, print_json, print_table
from tkv.errors import TkvError, UnsupportedError
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, key_of_case, programs_of_case

if TYPE_CHECKING:
    from tkv.tune.arch import Part
    from tkv.tune.cases import Case
    from tkv.tune.compile import Report


def add(commands: Commands) -> None:
    """Add the parser."""
    inspect = commands.add_parser(
        "inspect",
        help="a kernel's registers, spills, shared memory and the instructions of its loop, for any architecture",
        description="Compiles the kernel of a call, on a CPU, for one architecture or all, and reads the machine code. "
        "The exit status is 1 if a kernel does not compile, spills, or does not fit.",
        epilog="example: tkv inspect paged_decode --arch sm90 --format fp8_e4m3/tensor --config block_n=64,num_warps=8",
    )
    inspect.add_argument("op", choices=INSPECTED_OPS, metavar="OP", help=", ".join(INSPECTED_OPS))
    where = inspect.add_mutually_exclusive_group()
    where.add_argument("--arch", type=arch, action="append", help="may be repeated (default: that of this machine's GPU)")
    where.add_argument("--all-arch", action="store_true", help="one table for all architectures")
    inspect.add_argument("--part", type=part, help="the GPU whose rates say what bounds the loop (default: the first of the architecture)")
    inspect.add_argument(
        "--config", type=overrides, default={}, metavar="NAME=VALUE,...", help="tunables that differ from what the function would take"
    )
    add_call(inspect)
    inspect.add_argument("--workers", type=positive, help="compiling processes (default: one a core)")
    inspect.add_argument("--json", action="store_true", help="for machines")
    inspect.set_defaults(run=lambda args: _run(args, inspect))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    archs = _archs(args, parser)
    try:
        case = case_of(args.op, args)
        jobs = [(case, name, _config(args, case, name)) for name in archs]
    except TkvError as error:
        parser.error(str(error))
    from tkv.tune.compile import compile_all
    from tkv.tune.store import Store

    with Progress("compiling", len(jobs)) as progress:
        reports = list(compile_all(jobs, args.workers, lambda done: progress.step(done.arch), Store()))
    found = [_numbers(report, args) for report in reports]
    if args.json:
        print_json(found if len(found) > 1 else found[0])
    else:
        print(f"{args.op}: {case.name}, Triton {reports[0].triton}\n")
        if len(found) > 1:
            _print_table(found)
        else:
            _print_one(found[0], args.op)
    return 1 if any(numbers["problems"] for numbers in found) else 0


def _archs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    from tkv.tune.arch import ARCHS, arch_of_device

    named = list(ARCHS) if args.all_arch else list(dict.fromkeys(args.arch or ()))
    if args.part:
        if named and named != [args.part.arch]:
            parser.error(f"argument --part: {args.part.name} is {args.part.arch}; leave --arch out")
        return [args.part.arch]
    if named:
        return named
    try:
        return [arch_of_device().name]
    except TkvError:
        parser.error("this machine has no GPU that tkv knows: give --arch, such as --arch sm90, or --all-arch")


def _config(args: argparse.Namespace, case: Case, arch: str) -> AttentionConfig | None:
    """The config to compile with: that of the arguments, or None for the one that the function would take."""
    from tkv.tune.cases import launch_of
    from tkv.tune.compile import config_of

    launch = launch_of(case, arch)
    if not args.config:
        return None
    base = config_of(launch)
    if base is None or args.op not in OP_KINDS:
        raise UnsupportedError(f"config: {args.op} has no tunables")
    return config_with(base, args.config, args.op)


def _numbers(report: Report, args: argparse.Namespace) -> dict[str, Any]:
    """What there is to say about a report, for JSON."""
    from tkv.tune.arch import arch as facts_of
    from tkv.tune.limits import ctas_per_sm

    facts = facts_of(report.arch)
    return {
        "op": args.op,
        "arch": report.arch,
        "case": asdict(report.case),
        "triton": report.triton,
        "config": None if report.config is None else asdict(report.config),
        "config_from": _origin(report, args),
        "num_warps": report.num_warps,
        "num_stages": report.num_stages,
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        "shared_limit": facts.shared_per_block,
        "ctas_per_sm": None if report.error else ctas_per_sm(facts, report.registers, report.shared, report.num_warps),
        "instructions": len(report.code),
        "loop": _loop(report, args.part),
        "problems": _problems(report, args),
    }


def _problems(report: Report, args: argparse.Namespace) -> list[str]:
    """Why the kernel cannot run, or that a compiler passes over what the arguments ask for."""
    from tkv.tune.limits import report_problems
    from tkv.tune.select import config_problems

    found = report_problems(report)
    if found or not args.config or report.config is None:
        return found
    return config_problems(report.config, key_of_case(args.op, report.case), report.arch)


def _loop(report: Report, part: Part | None) -> dict[str, Any] | None:
    """What the loop of an attention function asks of an SM of a part; None where there is no such loop."""
    from tkv.tune.analysis import analyse
    from tkv.tune.arch import reference_part

    if report.error or report.config is None:
        return None
    part = part or reference_part(report.arch)
    found = analyse(report, part)
    return {
        "part": None if part is None else part.name,
        "per": found.per,
        "warp_instructions": found.num_instructions,
        "classes": dict(sorted(found.instructions.items(), key=lambda item: -item[1])),
        "names": report.loop,
        "bytes": found.bytes,
        "bytes_in_flight": found.bytes_in_flight,
        "bytes_needed_in_flight": found.bytes_needed,
        "cycles": found.cycles,
        "bound": found.bound,
        "unknown": list(found.unknown),
    }


def _origin(report: Report, args: argparse.Namespace) -> str | None:
    """Where the config came from."""
    import torch

    from tkv.ops.launch import num_sms
    from tkv.tune.cases import MAX_PAGES, NUM_KV_HEADS, NUM_SEQS
    from tkv.tune.select import explain

    if report.config is None:
        return None
    if args.config:
        return "--config"
    work = programs_of_case(args.op, report.case, NUM_SEQS, NUM_KV_HEADS) / num_sms(torch.device("meta"))
    launched = _as_launched(report.config, args.op, report.case)
    for row in explain(args.op, key_of_case(args.op, report.case), report.arch, work=work, keys=MAX_PAGES * report.case.page_size):
        if row.config is not None and row.outcome != "rejected" and _as_launched(row.config, args.op, report.case) == launched:
            return "analytic default" if row.source == "default" else f"{row.source} ({row.origin})"
    return None


def _as_launched(config: AttentionConfig, op: str, case: Case) -> AttentionConfig:
    """What a launch shows of a config: no length of splits, and of key_scores no stages and a tile of at least a group's heads."""
    if op == "key_scores":
        config = replace(config, block_m=max(config.block_m, 1 << (case.group - 1).bit_length()), num_stages=1)
    return replace(config, split_len=None)


def _row(numbers: dict[str, Any]) -> dict[str, object]:
    """A line of the table over architectures."""
    config, loop = numbers["config"], numbers["loop"]
    row: dict[str, object] = {"arch": numbers["arch"]}
    if config is not None:
        row["tile"] = f"{config['block_m']}x{config['block_n']}"
    row |= {"warps": numbers["num_warps"], "stages": numbers["num_stages"], "registers": numbers["registers"], "spills": numbers["spills"]}
    row |= {"shared": numbers["shared"], "CTAs": numbers["ctas_per_sm"]}
    if config is None:
        row["instr."] = numbers["instructions"]
    elif loop is None:
        row |= dict.fromkeys(("instr.", "in flight", "bound by", "on", "config"))
    else:
        in_flight = loop["bytes_in_flight"]
        row |= {"instr.": loop["warp_instructions"], "in flight": None if in_flight is None else bytes_text(in_flight)}
        row |= {"bound by": loop["bound"] or "unknown", "on": loop["part"], "config": numbers["config_from"]}
    return {**row, "problems": "; ".join(numbers["problems"])}


def _print_table(found: list[dict[str, Any]]) -> None:
    """A line for each architecture."""
    print_table([_row(numbers) for numbers in found], right=("in flight",))
    per = next((numbers["loop"]["per"] for numbers in found if numbers["loop"]), None)
    counted = f"warp instructions of the main loop per {per}; in flight: bytes that an SM asks for ahead" if per else "of the kernel"
    print(f"\nCTAs: programs that an SM holds; instr.: {counted}")


def _print_one(numbers: dict[str, Any], op: str) -> None:
    """All there is to say about one architecture."""
    config = numbers["config"] and AttentionConfig(**numbers["config"])
    ctas, loop = numbers["ctas_per_sm"], numbers["loop"]
    facts = {
        "arch": numbers["arch"],
        "config": f"{config_text(config, op)} ({numbers['config_from'] or 'source unknown'})"
        if config
        else f"num_warps={numbers['num_warps']}",
        "registers": f"{numbers['registers']} a thread, {numbers['spills']} spilled",
        "shared memory": f"{numbers['shared']:,} bytes a program, of {numbers['shared_limit']:,}",
        "CTAs per SM": "unknown" if ctas is None else str(ctas),
    }
    if loop is None:
        facts["instructions"] = f"{numbers['instructions']:,}"
    else:
        per, needed = loop["per"], loop["bytes_needed_in_flight"]
        facts["main loop"] = f"{loop['warp_instructions']:.4g} warp instructions and {loop['bytes']:.4g} bytes per {per}"
        if loop["bytes_in_flight"] is not None:
            facts["in flight"] = bytes_text(loop["bytes_in_flight"]) + " an SM"
            facts["in flight"] += "" if needed is None else f", of {bytes_text(needed)} that draw its share of the bandwidth"
        facts["bound by"] = f"{loop['bound'] or 'unknown'}" + (f", on {loop['part']}" if loop["part"] else "")
    for name, text in facts.items():
        print(f"{name:15}{text}")
    if loop is not None:
        total, head = loop["warp_instructions"], f"instr. per {loop['per']}"
        rows = [{"class": name, head: count, "share": f"{count / total:.0%}"} for name, count in loop["classes"].items()]
        cycles = [{"unit": unit, f"cycles of an SM per {loop['per']}": count} for unit, count in loop["cycles"].items()]
        cycles += [{"unit": unit, f"cycles of an SM per {loop['per']}": "unknown"} for unit in loop["unknown"]]
        for table in (rows, cycles):
            print()
            print_table(table, right=list(table[0])[1:] if table else ())
    for problem in numbers["problems"]:
        print(f"problem: {problem}")
