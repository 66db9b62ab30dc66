"""The subcommands of ``tkv``, one module each.

A module's ``add(commands)`` adds its parser and sets ``run``, a function of the parsed arguments that returns the exit status. Modules
import what they need when they run: Triton must not be imported before the command line has chosen between a GPU and the interpreter.
"""

from __future__ import annotations

import argparse
from typing import NoReturn, TypeAlias

# What `add_subparsers` gives; the class has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class CommandError(Exception):
    """The command cannot do what was asked; the message is one line and says what to do."""


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says more)\n")
